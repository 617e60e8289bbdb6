// Rollouts of all steps and evaluations of a run or a campaign's runs that pass the filters.

import {Answered, Title} from "../components/states.js";
import {plural} from "../format.js";
import {go, link, useAddress} from "../lib/address.js";
import {useAnswer} from "../lib/answer.js";
import {html} from "../lib/html.js";
import {nameOf} from "../names.js";
import {splitName} from "./reading.js";
import {Filters, Samples, filtersOf} from "./rollouts_parts.js";

const MOST = 100;

export function SearchResults() {
  const {place, query} = useAddress();
  const {run, split, first, sort, down} = query;
  const at = run || place;
  const answer = useAnswer("search", {at, split, first, sort, down, count: MOST, ...filtersOf(query)});
  const state = answer.loading ? html`<span class="spin" aria-hidden="true" />Searching …` : null;
  return html`<${Title} title="Rollouts" words=${`all steps of ${nameOf(at)}`}>
      <p class="muted" role="status">${state}</p>
    <//>
    <${Filters} body=${null} />
    <${Answered} of=${answer}>${(body) => html`<${List} body=${body} />`}<//>`;
}

// `body`: the answer of /api/search.
function List({body: {rollouts: rows, passing, searched, of, next}}) {
  const {query, patch} = useAddress();
  // A rollout's own step, where it is chosen among those of its step that pass the same search.
  const href = ({place, split, iteration, index}) =>
    link("rollouts", place, {split: split === "train" ? null : split, iteration, index, text: query.text});
  const sort = (key, down) => {
    const isNewest = key === "newest";
    patch({sort: isNewest ? null : key, down: isNewest || down ? null : 0, first: null});
  };
  // The newest first is the one order by step that the server has.
  const step = ({split, iteration}) => `${splitName(split)}, step ${iteration}`;
  const columns = [
    {key: "newest", title: "step", number: true, value: (row) => row.iteration, cell: step},
    {key: "run", title: "run", cell: (row) => nameOf(row.place)},
  ];
  const order = {sort: query.sort || "newest", down: query.down !== "0", onSort: sort};
  const keyOf = ({place, split, iteration, index}) => [place, split, iteration, index].join(" ");
  const table = {
    label: "rollouts of all steps",
    noun: "rollout",
    rows,
    columns,
    keyOf,
    href,
    isSortable: false,
    ...order,
  };
  const button = (text, to) => html`<button type="button" onClick=${() => patch({first: to})}>${text}</button>`;
  return html`<div class="tools">
      <span class="muted">${plural(passing, "rollout")} found, ${searched} of ${plural(of, "step")} searched</span>
      ${query.first && button("From the newest step", null)}
      ${next !== null && button("Search further steps", next)}
    </div>
    ${rows.length > 0 && html`<${Samples} ...${table} onOpen=${(row) => go(href(row))} />`}`;
}
