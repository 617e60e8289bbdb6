// Rollouts of a step: how rewards lie, groups as strips, samples to sort and filter, and one of them opened beside.

import {get, gone} from "../api.js";
import {Rate} from "../components/marks.js";
import {Answered, Empty, Failed, Loading} from "../components/states.js";
import {number, plural} from "../format.js";
import {useKeys} from "../keys.js";
import {useAddress} from "../lib/address.js";
import {useAnswer} from "../lib/answer.js";
import {html, useEffect, useRef, useState} from "../lib/html.js";
import {go, link} from "../router.js";
import {Found} from "./found.js";
import {Outcome, PromptBox, Search, Strip, Turns} from "./conversation.js";
import {Pager, RunChoice, SplitChoice, Steps, promptLink, splitName, stepBeside} from "./reading.js";
import {NO_ROWS, SampledAnswer, useIterationAnswer, useNextRow, useSampled} from "./reading.js";
import {FILTERS, Filters, Groups, Rewards, Samples} from "./rollouts_parts.js";

const PAGE = 100;
const SIDE_BY_SIDE = 16;

/** @typedef {Record<string, string>} Query */
/** @typedef {import("../keys.js").KeyMap} KeyMap */

/** @param {{query: Query, run: string, split: string, first: number}} address */
function questionOf({query, run, split, first}) {
  const filters = Object.fromEntries(FILTERS.map((key) => [key, query[key]]));
  const {iteration, sort, down} = query;
  return {at: run, split, iteration, sort, down, first, count: PAGE, ...filters};
}

export function Rollouts() {
  const {query} = useAddress();
  return query.steps === "all" ? html`<${Found} />` : html`<${OneStep} />`;
}

function OneStep() {
  const {place, query, patch} = useAddress();
  const sampled = useSampled();
  const {run, split, ready, empty, iterations} = sampled;
  const first = Math.max(0, Number(query.first) || 0);
  const index = query.index === undefined ? null : Number(query.index);
  const question = ready ? questionOf({query, run, split, first}) : null;
  const kinds = query.iteration === undefined ? ["metrics", "evals"] : null;
  const list = useIterationAnswer("rollouts", question, {kinds, wait: 3000});
  const {data, isCurrent} = list;
  const steps = iterations.map((each) => each.iteration);
  const about = data && data.about;
  // A chosen sample fixes its step, as the newest one moves on while a run trains.
  const choose = (to, options) => patch({iteration: about.iteration, index: to}, options);
  const close = () => {
    const isNewest = about && stepBeside(steps, about.iteration, 1) === null;
    patch({index: null, beside: null, ...(isNewest ? {iteration: null} : {})});
  };
  const rows = data ? data.rollouts : NO_ROWS;
  const next = useNextRow(
    {rows, total: data ? data.passing : 0, isCurrent, first, page: PAGE},
    "index",
    index,
    choose,
  );
  const open = () => index !== null && about && go(link("tokens", run, {...placeOf(query, about), index}));
  useKeys({
    ...keysOf({data, steps, index, choose, query, patch}),
    j: ["next sample", next(1)],
    k: ["previous sample", next(-1)],
    Enter: [OPEN, open],
    Escape: [CLOSE, close],
  });
  const body = () => {
    const pages = {first, page: PAGE, shown: data.rollouts.length, total: data.passing};
    return html`<${List} data=${data} index=${index} choose=${choose} />
      <${Pager} ...${pages} onFirst=${(to) => patch({first: to})} />`;
  };
  const opened = {run, split, index, family: sampled.family, place};
  return html`<${Title} data=${data} />
    <${Tools} sampled=${sampled} steps=${steps} about=${about} />
    <div class="stack">
      ${data && !empty && html`<${Overview} data=${data} index=${index} choose=${choose} />`}
      <${Filters} body=${data} />
      <div class=${`panes ${index === null ? "" : "opened"}`}>
        <section class="list" aria-label="rollouts">
          <${SampledAnswer} sampled=${sampled} of=${list}>${body}<//>
        </section>
        <aside class="beside" aria-label="the chosen rollout">
          ${index !== null && ready && html`<${Opened} ...${opened} choose=${choose} close=${close} />`}
        </aside>
      </div>
    </div>`;
}

const OPEN = "open the chosen sample's tokens";
const CLOSE = "close the sample";

function placeOf(query, about) {
  return {split: query.split, iteration: about.iteration};
}

function keysOf({data, steps, index, choose, query, patch}) {
  const group = (by) => () => {
    const groups = data ? data.groups : [];
    const at = groups.findIndex((each) => each.samples.some((one) => one.index === index));
    const to = groups[at < 0 ? 0 : at + by];
    if (!to) return;
    const sample = to.samples[0].index;
    if (query.group === undefined) choose(sample, {replace: true});
    else patch({iteration: data.about.iteration, index: sample, group: to.group, first: null}, {replace: true});
  };
  const step = (by) => () => {
    const to = data ? stepBeside(steps, data.about.iteration, by) : null;
    if (to !== null) patch({iteration: to, first: null});
  };
  return /** @type {KeyMap} */ ({
    h: ["step back", step(-1)],
    l: ["step forward", step(1)],
    g: ["next group", group(1)],
    G: ["previous group", group(-1)],
  });
}

/** @param {{data: any}} props */
function Title({data}) {
  if (!data) return html`<div class="title"><h1>Rollouts</h1><p class="muted" /></div>`;
  const {about, groups, total, passing, correct} = data;
  const parts = [splitName(about.split), `step ${about.iteration}`, plural(groups.length, "group")];
  parts.push(passing === total ? plural(total, "rollout") : `${passing} of ${plural(total, "rollout")}`);
  const {rate, ...interval} = correct;
  const share = rate !== null && html` · <${Rate} value=${rate} ...${interval} /> correct`;
  return html`<div class="title"><h1>Rollouts</h1><p class="muted">${parts.join(" · ")}${share}</p></div>`;
}

/** @param {{sampled: any, steps: number[], about: any}} props */
function Tools({sampled: {runs, run, split, splits}, steps, about}) {
  const {patch} = useAddress();
  const other = (value) => {
    const changes = {iteration: null, index: null, first: null, group: null, problem: null};
    patch({split: value === "train" ? null : value, ...changes});
  };
  const choose = (value) => patch({run: value, index: null, first: null, iteration: null});
  const step = (iteration) => patch({iteration, first: null}, {replace: true});
  const shortened = "this step has no token file: texts may be shortened";
  return html`<div class="tools">
    ${runs.length > 1 && html`<${RunChoice} label="run" runs=${runs} value=${run} onChoose=${choose} />`}
    <${SplitChoice} splits=${splits} value=${split} onChoose=${other} />
    <${Steps} label="step" steps=${steps} step=${about ? about.iteration : null} onStep=${step} />
    ${about && !about.recorded && html`<span class="small muted">${shortened}</span>`}
  </div>`;
}

/** @param {{data: any, index: number | null, choose: (index: number) => void}} props */
function Overview({data, index, choose}) {
  const {query, patch} = useAddress();
  const {reward_min: low, reward_max: high} = query;
  const group = query.group === undefined ? null : Number(query.group);
  const bar = (ends) => patch({reward_min: ends && ends[0], reward_max: ends && ends[1], first: null});
  const pick = (to) => patch({group: to, first: null});
  const shown = {groups: data.groups, group, index, onGroup: pick, onSample: choose};
  return html`<div class="overview">
    <${Rewards} histogram=${data.histogram} chosen=${[low, high]} onPick=${bar} /><${Groups} ...${shown} />
  </div>`;
}

/** @param {{data: any, index: number | null, choose: (index: number) => void}} props */
function List({data, index, choose}) {
  const {query, patch, linkTo} = useAddress();
  const href = ({index: to}) => linkTo({iteration: data.about.iteration, index: to});
  if (data.rollouts.length) {
    const shown = {rows: data.rollouts, query, index, href};
    return html`<${Samples} ...${shown} set=${patch} onOpen=${choose} />`;
  }
  return html`<${Empty} title="No rollout passes these filters">${data.total} were sampled in this step.<//>`;
}

/**
 * @param {{run: string, split: string, index: number, family: any[], place: string, choose: (index: number) => void,
 *   close: () => void}} props
 */
function Opened({run, split, index, family, place, choose, close}) {
  const {query} = useAddress();
  const answer = useAnswer("rollout", {at: run, split, iteration: query.iteration, index});
  const root = useRef(/** @type {HTMLElement | null} */ (null));
  useEffect(() => {
    const pane = root.current && root.current.parentElement;
    if (pane) pane.scrollTop = 0;
  }, [answer.data]);
  const isBeside = query.beside === "1";
  const content = (data) => {
    const {prompt, line, siblings, about} = data;
    const tags = [`sample ${line.sample}`, ...(prompt.tags || [])].join(" · ");
    const others = {run, split, iteration: about.iteration, siblings, index};
    return html`<div class="head">
        <h2>${prompt.problem_id ?? `rollout ${index}`}<small>${tags}</small></h2>
        <button type="button" onClick=${close}>Close</button>
      </div>
      <${OpenedLinks} ...${{data, run, index, family, place, choose, isBeside}} />
      <${Search.Provider} value=${query.text || ""}>
        ${!isBeside && html`<${Outcome} line=${line} />`}
        <${PromptBox} prompt=${prompt} />
        ${isBeside ? html`<${Siblings} ...${others} />` : html`<${Turns} line=${line} />`}
      <//>`;
  };
  return html`<div ref=${root}><${Answered} of=${answer}>${content}<//></div>`;
}

/**
 * @param {{data: any, run: string, index: number, family: any[], place: string, choose: (index: number) => void,
 *   isBeside: boolean}} props
 */
function OpenedLinks({data: {prompt, siblings, about}, run, index, family, place, choose, isBeside}) {
  const {query, patch} = useAddress();
  const problem = prompt.problem_id;
  const sample = siblings.findIndex((each) => each.index === index);
  const twin = promptLink({family, place, run, about, problem, sample});
  const only = {run: query.run, split: query.split, iteration: query.iteration, problem, index};
  const many = html`<${Strip} samples=${siblings} chosen=${index} onPick=${choose} label="siblings" />
    <button
      type="button"
      aria-pressed=${String(isBeside)}
      title="all samples of the group beside each other"
      onClick=${() => patch({beside: isBeside ? null : 1})}
    >
      side by side
    </button>`;
  return html`<div class="tools">
    ${siblings.length > 1 && many}
    <a class="small" href=${link("tokens", run, {...placeOf(query, about), index})}>Tokens</a>
    <a class="small" href=${link("rollouts", place, only)}>only this problem</a>
    ${twin && html`<a class="small" href=${twin}>Same prompt</a>`}
  </div>`;
}

/** @param {{run: string, split: string, iteration: number, siblings: any[], index: number}} props */
function Siblings({run, split, iteration, siblings, index}) {
  const shown = siblings.slice(0, SIDE_BY_SIDE);
  const question = JSON.stringify({at: run, split, iteration, of: shown.map((each) => each.index)});
  const [state, setState] = useState({all: /** @type {any[] | null} */ (null), error: null});
  useEffect(() => {
    const controller = new AbortController();
    const ask = (each) => get("rollout", {at: run, split, iteration, index: each.index}, controller.signal);
    Promise.all(shown.map(ask)).then(
      (all) => setState({all, error: null}),
      (error) => !gone(error) && setState({all: null, error}),
    );
    return () => controller.abort();
  }, [question]);
  if (state.error) return html`<${Failed} error=${state.error} />`;
  if (!state.all) return html`<${Loading} />`;
  const article = ({line}, k) => {
    const own = shown[k];
    const grade = line.reward === null ? "not graded" : `reward ${number(line.reward)}`;
    return html`<article key=${k} class=${own && own.index === index ? "on" : null}>
      <h3>sample ${line.sample}<small>${grade} ${line.correct ? "✓" : "✗"}</small></h3>
      <${Turns} line=${line} />
    </article>`;
  };
  const rest = siblings.length - shown.length;
  return html`<div class="siblings">
    ${state.all.map(article)}${rest > 0 && html`<p class="muted">and ${rest} further samples</p>`}
  </div>`;
}
