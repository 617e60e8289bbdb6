// Rollouts of all steps and evaluations of a run or a campaign's runs that pass the filters.

import {DataTable} from "../components/data_table.js";
import {Answered} from "../components/states.js";
import {plural} from "../format.js";
import {useAddress} from "../lib/address.js";
import {useAnswer} from "../lib/answer.js";
import {html} from "../lib/html.js";
import {nameOf} from "../names.js";
import {go, link} from "../router.js";
import {splitName} from "./reading.js";
import {FILTERS, Filters, columnsOf} from "./rollouts_parts.js";

const MOST = 100;

function keyOf({place, split, iteration, index}) {
  return [place, split, iteration, index].join(" ");
}

/** A rollout's own step, where it is chosen among those of its step that pass the same search. */
function hrefOf({place, split, iteration, index}, text) {
  return link("rollouts", place, {split: split === "train" ? null : split, iteration, index, text});
}

export function Found() {
  const {place, query} = useAddress();
  const {run, split, first, sort, down} = query;
  const filters = Object.fromEntries(FILTERS.map((key) => [key, query[key]]));
  const answer = useAnswer("search", {at: run || place, split, first, sort, down, count: MOST, ...filters});
  const state = answer.loading ? html`<span class="spin" aria-hidden="true" />Searching …` : null;
  return html`<div class="title">
      <h1>Rollouts</h1>
      <p class="muted">all steps of ${nameOf(run || place)}</p>
      <p class="muted" role="status">${state}</p>
    </div>
    <${Filters} body=${null} />
    <${Answered} of=${answer}>${(body) => html`<${List} body=${body} />`}<//>`;
}

/** @param {{body: any}} props the answer of /api/search */
function List({body: {rollouts, passing, searched, of, next}}) {
  const {query, patch} = useAddress();
  const step = ({split, iteration}) => `${splitName(split)}, step ${iteration}`;
  const sort = (key, down) => {
    const isNewest = key === "newest";
    patch({sort: isNewest ? null : key, down: isNewest || down ? null : 0, first: null});
  };
  const href = (row) => hrefOf(row, query.text);
  // The newest first is the one order by step that the server has.
  const columns = [
    {key: "newest", title: "step", number: true, value: (row) => row.iteration, cell: step},
    {key: "run", title: "run", cell: (row) => nameOf(row.place)},
    ...columnsOf({turns: rollouts.some((row) => row.turns > 1), href, search: query.text}),
  ].map((each) => (each.key === "index" ? {...each, value: undefined} : each));
  const table = html`<${DataTable}
    class="tight wide samples"
    label="rollouts of all steps"
    noun="rollout"
    columns=${columns}
    rows=${rollouts}
    keyOf=${keyOf}
    sort=${query.sort || "newest"}
    down=${query.down !== "0"}
    onSort=${sort}
    onOpen=${(row) => go(href(row))}
  />`;
  const button = (text, to) => html`<button type="button" onClick=${() => patch({first: to})}>${text}</button>`;
  return html`<div class="tools">
      <span class="muted">${plural(passing, "rollout")} found, ${searched} of ${plural(of, "step")} searched</span>
      ${query.first && button("From the newest step", null)}
      ${next !== null && button("Search further steps", next)}
    </div>
    ${rollouts.length > 0 && table}`;
}
