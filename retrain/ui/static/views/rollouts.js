// Rollouts of a step: how rewards lie, groups as strips, samples to sort and filter, and one of them opened beside.

import {AddressTick, button} from "../components/inputs.js";
import {Rate} from "../components/marks.js";
import {Answered, ClosableHead, Empty, Title} from "../components/states.js";
import {number, plural} from "../format.js";
import {useKeys} from "../keys.js";
import {go, link, useAddress} from "../lib/address.js";
import {useAnswer} from "../lib/answer.js";
import {html, useEffect, useElement} from "../lib/html.js";
import {nameOf} from "../names.js";
import {Outcome, PromptBox, Search, Strip, Turns} from "./conversation.js";
import {Pager, Panes, PromptLink, SampledAnswer, SampledTools} from "./reading.js";
import {beside, splitName, usePages, useSampled} from "./reading.js";
import {Filters, Groups, Rewards, Samples, filtersOf} from "./rollouts_parts.js";

const SIDE_BY_SIDE = 16;

export function Rollouts() {
  const {query} = useAddress();
  return query.steps === "all" ? html`<${SearchResults} />` : html`<${OneStep} />`;
}

function OneStep() {
  const {query, patch} = useAddress();
  const sampled = useSampled();
  const {run, split, ready, empty} = sampled;
  const pages = usePages();
  const index = query.index === undefined ? null : Number(query.index);
  const {iteration, sort, down} = query;
  const {first, count} = pages;
  const question = {at: run, split, iteration, sort, down, first, count, ...filtersOf(query)};
  const kinds = iteration === undefined ? ["metrics", "evals"] : null;
  const list = useAnswer("rollouts", ready ? question : null, {kinds, wait: 3000});
  const {data} = list;
  const steps = sampled.iterations.map((each) => each.iteration);
  const about = data && data.about;
  // A chosen sample fixes its step, as the newest one moves on while a run trains.
  const choose = (to, options) => patch({iteration: about.iteration, index: to}, options);
  const close = () => {
    const isNewest = about && beside(steps, about.iteration, 1) === null;
    patch({index: null, beside: null, ...(isNewest ? {iteration: null} : {})});
  };
  const place = {split: query.split, iteration: about && about.iteration, index};
  const open = () => index !== null && about && go(link("tokens", run, place));
  useKeys({
    ...groupKeys({data, index, choose, query, patch}),
    Enter: ["open the chosen sample's tokens", open],
    Escape: ["close the sample", close],
  });
  const body = () => html`<${List} data=${data} index=${index} choose=${choose} turn=${pages.turn} />
    <${Pager} pages=${pages} shown=${data.rollouts.length} total=${data.passing} />`;
  const opened = html`<${Opened} ...${{sampled, index, choose, close}} />`;
  const overview =
    data &&
    html`<div class="overview">
      <${Rewards} histogram=${data.histogram} /><${Groups} groups=${data.groups} index=${index} onSample=${choose} />
    </div>`;
  return html`<${Head} data=${data} />
    <${SampledTools} ...${{sampled, steps, about}} resets=${{index: null, first: null, iteration: null}}>
      ${about && !about.recorded && html`<span class="small muted">${SHORTENED}</span>`}
    <//>
    <div class="stack">
      ${!empty && overview}<${Filters} body=${data} />
      <${Panes} label="rollouts" isOpen=${index !== null} chosen=${index !== null && ready && opened}>
        <${SampledAnswer} sampled=${sampled} of=${list}>${body}<//>
      <//>
    </div>`;
}

const SHORTENED = "this step has no token file: texts may be shortened";

function groupKeys({data, index, choose, query, patch}) {
  const group = (by) => () => {
    const groups = data ? data.groups : [];
    const at = groups.findIndex((each) => each.samples.some((one) => one.index === index));
    const to = groups[at < 0 ? 0 : at + by];
    if (!to) return;
    const sample = to.samples[0].index;
    if (query.group === undefined) choose(sample, {replace: true});
    else patch({iteration: data.about.iteration, index: sample, group: to.group, first: null}, {replace: true});
  };
  return /** @type {import("../keys.js").KeyMap} */ ({g: ["next group", group(1)], G: ["previous group", group(-1)]});
}

function Head({data}) {
  if (!data) return html`<${Title} title="Rollouts" />`;
  const {about, groups, total, passing, correct} = data;
  const many = passing === total ? plural(total, "rollout") : `${passing} of ${plural(total, "rollout")}`;
  const words = [splitName(about.split), `step ${about.iteration}`, plural(groups.length, "group"), many].join(" · ");
  const share = correct.rate !== null && html` · <${Rate} ...${correct} /> correct`;
  return html`<${Title} title="Rollouts" words=${html`${words}${share}`} />`;
}

function List({data, index, choose, turn}) {
  const {query, patch, linkTo} = useAddress();
  if (!data.rollouts.length) {
    return html`<${Empty} title="No rollout passes these filters">${data.total} were sampled in this step.<//>`;
  }
  const sort = (key, down) => patch({sort: key === "index" ? null : key, down: down ? 1 : null, first: null});
  const order = {sort: query.sort || "index", down: query.down === "1", onSort: sort};
  const table = {label: "rollouts", noun: "sample", rows: data.rollouts, keyOf: (row) => String(row.index)};
  const choice = {
    selected: (row) => row.index === index,
    onOpen: (row, options) => choose(row.index, options),
    onEnd: (by) => turn(by, data.passing),
  };
  const href = (row) => linkTo({iteration: data.about.iteration, index: row.index});
  return html`<${Samples} ...${table} ...${order} ...${choice} href=${href} />`;
}

function Opened({sampled, index, choose, close}) {
  const {place, query} = useAddress();
  const {run, split} = sampled;
  const answer = useAnswer("rollout", {at: run, split, iteration: query.iteration, index});
  const root = useElement();
  useEffect(() => {
    root.current.parentElement.scrollTop = 0;
  }, [answer.data]);
  const isBeside = query.beside === "1";
  const content = ({prompt, line, siblings, about}) => {
    const tags = [`sample ${line.sample}`, ...(prompt.tags || [])].join(" · ");
    const problem = prompt.problem_id;
    const sample = siblings.findIndex((each) => each.index === index);
    const only = {run: query.run, split: query.split, iteration: query.iteration, problem, index};
    const tokens = {split: query.split, iteration: about.iteration, index};
    const rest = siblings.length - SIDE_BY_SIDE;
    const article = (each) =>
      html`<${Sibling} key=${each.index} at=${run} about=${about} index=${each.index} isOn=${each.index === index} />`;
    const several = html`<div class="siblings">
      ${siblings.slice(0, SIDE_BY_SIDE).map(article)}
      ${rest > 0 && html`<p class="muted">and ${rest} further samples</p>`}
    </div>`;
    return html`<${ClosableHead} title=${problem ?? `rollout ${index}`} words=${tags} onClose=${close} />
      <div class="tools">
        ${
          siblings.length > 1 &&
          html`<${Strip} samples=${siblings} chosen=${index} onPick=${choose} label="siblings" />
            <${AddressTick} name="beside" title="all samples of the group beside each other">side by side<//>`
        }
        <a class="small" href=${link("tokens", run, tokens)}>Tokens</a>
        <a class="small" href=${link("rollouts", place, only)}>only this problem</a>
        <${PromptLink} ...${{sampled, about, problem, sample}} />
      </div>
      <${Search.Provider} value=${query.text || ""}>
        ${!isBeside && html`<${Outcome} line=${line} />`}<${PromptBox} prompt=${prompt} />
        ${isBeside ? several : html`<${Turns} line=${line} />`}
      <//>`;
  };
  return html`<div ref=${root}><${Answered} of=${answer}>${content}<//></div>`;
}

function Sibling({at, about: {split, iteration}, index, isOn}) {
  const answer = useAnswer("rollout", {at, split, iteration, index});
  return html`<article class=${isOn ? "on" : null}>
    <${Answered} of=${answer}>
      ${({line}) => {
        const grade = line.reward === null ? "not graded" : `reward ${number(line.reward)}`;
        return html`<h3>sample ${line.sample}<small>${grade} ${line.correct ? "✓" : "✗"}</small></h3>
          <${Turns} line=${line} />`;
      }}
    <//>
  </article>`;
}

const MOST = 100;

function SearchResults() {
  const {place, query} = useAddress();
  const {run, split, first, sort, down} = query;
  const at = run || place;
  const answer = useAnswer("search", {at, split, first, sort, down, count: MOST, ...filtersOf(query)});
  const state = answer.loading ? html`<span class="spin" aria-hidden="true" />Searching …` : null;
  return html`<${Title} title="Rollouts" words=${`all steps of ${nameOf(at)}`}>
      <p class="muted" role="status">${state}</p>
    <//>
    <${Filters} body=${null} />
    <${Answered} of=${answer}>${(body) => html`<${Found} body=${body} />`}<//>`;
}

function Found({body: {rollouts: rows, passing, searched, of, next}}) {
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
  const table = {label: "rollouts of all steps", noun: "rollout", rows, columns, keyOf, href, ...order};
  const from = (text, to) => button(text, () => patch({first: to}));
  return html`<div class="tools">
      <span class="muted">${plural(passing, "rollout")} found, ${searched} of ${plural(of, "step")} searched</span>
      ${query.first && from("From the newest step", null)}${next !== null && from("Search further steps", next)}
    </div>
    ${rows.length > 0 && html`<${Samples} ...${table} isSortable=${false} onOpen=${(row) => go(href(row))} />`}`;
}
