// "Why?" beside a number: what it is, what is healthy, what was noted about it in this run, and what to do.

import {get} from "./api.js";
import {openDialog} from "./components/dialog.js";
import {Failed, Loading} from "./components/states.js";
import {number} from "./format.js";
import {html, useEffect, useState} from "./lib/html.js";
import {nameOf} from "./names.js";
import {link} from "./lib/address.js";

const MOST_RUNS = 12;
const UNKNOWN = "The catalogue has no definition of this key: it comes from your own code or from another tool.";

export function why(key, runs) {
  const places = runs.slice(0, MOST_RUNS).map((run) => run.place);
  openDialog({title: key, class: "why"}, html`<${Why} metricKey=${key} places=${places} />`);
}

async function explanation(key, places) {
  const answers = await Promise.allSettled(places.map((at) => get("why", {key, at})));
  const good = answers.flatMap((each, i) => (each.status === "fulfilled" ? [{...each.value, place: places[i]}] : []));
  if (!good.length) throw /** @type {PromiseRejectedResult} */ (answers[0]).reason;
  return good;
}

function presentValue(known) {
  if (!known.length) return null;
  const values = known.map((each) => each.value);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const range = number(low) + (low === high ? "" : ` to ${number(high)}`);
  const step = Math.max(...known.map((each) => each.step));
  return `${range} at step ${step}${known.length > 1 ? ` of ${known.length} runs` : ""}`;
}

function Why({metricKey, places}) {
  const [{answers, error}, setState] = useState(/** @type {{answers?: any[], error?: any}} */ ({}));
  useEffect(() => {
    explanation(metricKey, places).then(
      (found) => setState({answers: found}),
      (reason) => setState({error: reason}),
    );
  }, []);
  if (error) return html`<${Failed} error=${error} />`;
  if (!answers) return html`<${Loading} />`;
  const metric = answers[0].metric || {};
  const facts = [
    ["now", presentValue(answers.filter((each) => each.value !== null))],
    ["unit", metric.unit],
    ["healthy", metric.healthy && metric.healthy.text],
    ["section", metric.section],
    ["also called", (metric.aliases || []).join(", ")],
    ["note", metric.note],
  ].filter(([, value]) => value);
  const note = ({level, run, step, text, remedy}) => html`<li class=${level === "warning" ? "warn" : null}>
    ${`${run}, step ${step}: ${text}`}${remedy && html`<div class="muted">${remedy}</div>`}
  </li>`;
  const noted = () => html`<h3>Noted here</h3><ul class="plain">${notes.map(note)}</ul>`;
  const notes = answers.flatMap((each) => each.notes.map((one) => ({...one, run: nameOf(each.place)})));
  return html`<p class=${metric.definition ? null : "muted"}>${metric.definition || UNKNOWN}</p>
    <dl class="facts">${facts.map(([name, value]) => html`<dt key=${name}>${name}</dt><dd>${value}</dd>`)}</dl>
    ${notes.length ? noted() : html`<p class="muted">Nothing was noted about it here.</p>`}
    <p class="small"><a href=${link("notes", places[0])}>all notes and the log</a></p>`;
}
