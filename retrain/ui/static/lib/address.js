// The address is the whole state: /<view>/<place>?<query>. Views read it and change it here only. A copy without a
// server has one address, so there the state stands behind a hash sign.

import {isCopy} from "../copy.js";
import {createContext, useCallback, useContext} from "./html.js";

/**
 * @typedef {Record<string, string>} Query
 * @typedef {{view: string, place: string, query: Query}} State
 * @typedef {(changes: Record<string, unknown>, options?: {replace?: boolean}) => void} Patch
 */

/** @type {(state: State) => void} */
let show = () => {};

// Segments of a path may keep what is safe there, so that links stay readable.
function segment(text) {
  return encodeURIComponent(text).replace(/%(2B|3D|40|3A|2C|24|26)/g, (code) => decodeURIComponent(code));
}

function plain(text) {
  try {
    return decodeURIComponent(text);
  } catch (error) {
    return text;
  }
}

export function link(view, place, query) {
  const path = view === "campaigns" ? "/" : `/${view}/${(place || "").split("/").map(segment).join("/")}`;
  const given = Object.entries(query || {}).filter(([, value]) => (value ?? "") !== "");
  const text = new URLSearchParams(given.map(([key, value]) => [key, String(value)]))
    .toString()
    .replace(/%2F/g, "/")
    .replace(/%2C/g, ",");
  return (isCopy() ? "#" : "") + (text ? `${path}?${text}` : path);
}

function address() {
  if (!isCopy()) return [location.pathname, location.search];
  const [path, ...query] = (location.hash.slice(1) || "/").split("?");
  return [path, query.join("?")];
}

function here() {
  const [path, search] = address();
  const [, view, ...rest] = path.split("/");
  const query = Object.fromEntries(new URLSearchParams(search));
  delete query.token;
  return {view: view || "campaigns", place: rest.map(plain).join("/").replace(/\/+$/, ""), query};
}

export function go(url, {replace = false} = {}) {
  const present = isCopy() ? location.hash : location.pathname + location.search;
  if (url !== present) history[replace ? "replaceState" : "pushState"](null, "", url);
  show(here());
}

/** Call a function with the address's state now and whenever that changes. */
export function startRouter(onState) {
  show = onState;
  addEventListener("popstate", () => show(here()));
  document.addEventListener("click", (event) => {
    const anchor = /** @type {Element} */ (event.target).closest("a");
    const modified = event.button || event.metaKey || event.ctrlKey || event.shiftKey;
    if (!anchor || !anchor.hasAttribute("href") || event.defaultPrevented || modified) return;
    if (anchor.target || anchor.hasAttribute("download") || anchor.origin !== location.origin) return;
    const target = anchor.getAttribute("href") || "";
    if (target.startsWith("#") && !(isCopy() && target.startsWith("#/"))) return;
    event.preventDefault();
    go(isCopy() ? target : anchor.pathname + anchor.search);
  });
  show(here());
}

export const AddressContext = createContext(/** @type {State} */ ({view: "", place: "", query: {}}));

// Return the view's place and query. `patch` changes keys of the query (null removes one; `{replace: true}` while
// typing or sliding) and does nothing once the page shows another view. `linkTo` is a link to this view with another
// query.
export function useAddress() {
  const {view, place, query} = useContext(AddressContext);
  /** @type {Patch} */
  const patch = useCallback(
    (changes, options) => {
      const now = here();
      if (now.view === view && now.place === place) go(link(view, place, {...now.query, ...changes}), options);
    },
    [view, place],
  );
  const linkTo = (changes) => link(view, place, {...query, ...changes});
  return {view, place, query, patch, linkTo};
}
