// "Why?" beside a number: what it is, what is healthy, what was noted about it in this run, and what to do.

import {get} from "./api.js";
import {openDialog} from "./components/dialog.js";
import {Failed, Loading} from "./components/states.js";
import {number} from "./format.js";
import {html, useEffect, useState} from "./lib/html.js";
import {nameOf} from "./names.js";
import {link} from "./router.js";

const MOST_RUNS = 12;

// Fetch a metric's definition once, and its values and notes of each of these runs.
async function explanation(key, places) {
  const asked = places.slice(0, MOST_RUNS);
  const answers = await Promise.allSettled(asked.map((at) => get("why", {key, at})));
  const good = answers.flatMap((each, i) => (each.status === "fulfilled" ? [{...each.value, place: asked[i]}] : []));
  if (!good.length) throw /** @type {PromiseRejectedResult} */ (answers[0]).reason;
  const notes = good.flatMap((each) => each.notes.map((note) => ({...note, run: nameOf(each.place)})));
  return {metric: good[0].metric, values: good.filter((each) => each.value !== null), notes};
}

/**
 * Open the explanation of a metric.
 * @param {string[]} places the runs that it concerns
 */
export function why(key, places) {
  openDialog({title: key, class: "why"}, html`<${Why} metricKey=${key} places=${places} />`);
}

/** @param {{metricKey: string, places: string[]}} props */
function Why({metricKey, places}) {
  const [{answer, error}, setState] = useState(/** @type {{answer?: any, error?: any}} */ ({}));
  useEffect(() => {
    explanation(metricKey, places).then(
      (found) => setState({answer: found}),
      (reason) => setState({error: reason}),
    );
  }, []);
  if (error) return html`<${Failed} error=${error} />`;
  if (!answer) return html`<${Loading} />`;
  const {metric, notes, values} = answer;
  return html`<div>
    ${
      metric && metric.definition
        ? html`<p>${metric.definition}</p>`
        : html`<p class="muted">
          The catalogue has no definition of this key: it comes from your own code or from another tool.
        </p>`
    }
    ${metric && html`<${Facts} metric=${metric} values=${values} />`}
    <${Notes} notes=${notes} />
    <p class="small"><a href=${link("notes", places[0])}>all notes and the log</a></p>
  </div>`;
}

/** @param {{value: number, step: number}[]} values */
function presentValue(values) {
  if (!values.length) return null;
  const all = values.map((each) => each.value);
  const [low, high] = [Math.min(...all), Math.max(...all)];
  const range = number(low) + (low === high ? "" : ` to ${number(high)}`);
  const step = Math.max(...values.map((each) => each.step));
  return `${range} at step ${step}${values.length > 1 ? ` of ${values.length} runs` : ""}`;
}

/** @param {{metric: any, values: any[]}} props */
function Facts({metric, values}) {
  const facts = [
    ["now", presentValue(values)],
    ["unit", metric.unit],
    ["healthy", metric.healthy && metric.healthy.text],
    ["section", metric.section],
    ["also called", (metric.aliases || []).join(", ")],
    ["note", metric.note],
  ];
  const known = facts.filter(([, value]) => value);
  return html`<dl class="facts">
    ${known.map(([name, value]) => html`<dt key=${name}>${name}</dt><dd>${value}</dd>`)}
  </dl>`;
}

/** @param {{notes: any[]}} props */
function Notes({notes}) {
  if (!notes.length) return html`<p class="muted">Nothing was noted about it here.</p>`;
  const row = (note) =>
    html`<li class=${note.level === "warning" ? "warn" : null}>
      ${`${note.run}, step ${note.step}: ${note.text}`}
      ${note.remedy && html`<div class="muted">${note.remedy}</div>`}
    </li>`;
  return html`<div><h3>Noted here</h3><ul class="plain">${notes.map(row)}</ul></div>`;
}
