// Fields in which any campaign or run below the given directories is chosen by its name.

import {Field} from "../components/inputs.js";
import {useAnswer} from "../lib/answer.js";
import {html} from "../lib/html.js";

/**
 * Return these places and those of all campaigns.
 * @param {string[]} first
 */
export function usePlaces(first = []) {
  const {data} = useAnswer("places", {}, {kinds: ["state"], wait: 5000});
  return [...new Set([...first, ...(data ? data.places : []).map((each) => each.place)])];
}

/** @param {{label: string, value: string, options: string[], onChoose: (place: string | null) => void}} props */
export function PlaceField({label, value, options, onChoose}) {
  const field = {label, value, options, class: "place", placeholder: "a campaign or a run …"};
  return html`<${Field} ...${field} onEnter=${(text) => onChoose(text || null)} />`;
}
