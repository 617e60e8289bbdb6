// What both ways to compare share: the choice of any campaign or run by its name, and settings as they are written.

import {Field} from "../components/inputs.js";
import {useAnswer} from "../lib/answer.js";
import {shownValue} from "../lib/groups.js";
import {html} from "../lib/html.js";

export const KEY_COLUMN = {key: "key", title: "key", head: true, cell: ({key}) => html`<code>${key}</code>`};

// A field that offers these places and those of all campaigns.
export function PlaceField({label, value, first = [], onChoose}) {
  const {data} = useAnswer("places", {}, {kinds: ["state"], wait: 5000});
  const options = [...new Set([...first, ...(data ? data.places : []).map((each) => each.place)])];
  const field = {label, value, options, class: "place", placeholder: "a campaign or a run …"};
  return html`<${Field} ...${field} onEnter=${(text) => onChoose(text || null)} />`;
}

export function Value({value}) {
  const isSet = value !== null && value !== undefined;
  return isSet ? shownValue(value) : html`<span class="muted">${shownValue(value)}</span>`;
}
