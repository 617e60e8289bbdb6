// The address as components read and change it.

import {here, link, patch as patchAddress} from "../router.js";
import {createContext, useCallback, useContext} from "./html.js";

export {go, link} from "../router.js";

/**
 * @typedef {Record<string, string>} Query
 * @typedef {{view: string, place: string, query: Query}} State
 * @typedef {(changes: Record<string, unknown>, options?: {replace?: boolean}) => void} Patch
 */

export const AddressContext = createContext(/** @type {State} */ ({view: "", place: "", query: {}}));

// Return the view's place and query. `patch` changes keys of the query (null removes one; `{replace: true}` while
// typing); it does nothing once the page shows another view. `linkTo` is a link to this view with other keys.
export function useAddress() {
  const {view, place, query} = useContext(AddressContext);
  /** @type {Patch} */
  const patch = useCallback(
    (changes, options) => {
      const now = here();
      if (now.view === view && now.place === place) patchAddress(changes, options);
    },
    [view, place],
  );
  const linkTo = (changes) => link(view, place, {...query, ...changes});
  return {view, place, query, patch, linkTo};
}
