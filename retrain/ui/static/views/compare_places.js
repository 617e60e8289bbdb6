// Fields in which any campaign or run below the given directories is chosen by its name.

import {useAnswer} from "../lib/answer.js";
import {html, useEffect, useRef} from "../lib/html.js";

/**
 * The names of these places and of all campaigns, for fields whose `list` is this id.
 * @param {{id: string, first: string[]}} props
 */
export function PlaceNames({id, first}) {
  const all = useAnswer("places", {}, {kinds: ["state"], wait: 5000});
  const others = ((all.data && all.data.places) || []).map((each) => each.place);
  const options = [...new Set([...first, ...others])];
  return html`<datalist id=${id}>
    ${options.map((place) => html`<option key=${place} value=${place} />`)}
  </datalist>`;
}

/** @param {{label: string, value: string, list: string, onChoose: (place: string | null) => void}} props */
export function PlaceField({label, value, list, onChoose}) {
  const field = useRef(/** @type {HTMLInputElement | null} */ (null));
  useEffect(() => {
    if (field.current && document.activeElement !== field.current) field.current.value = value;
  }, [value]);
  return html`<input
    ref=${field}
    type="text"
    class="place"
    list=${list}
    aria-label=${label}
    placeholder="a campaign or a run …"
    onChange=${(event) => onChoose(event.target.value || null)}
  />`;
}
