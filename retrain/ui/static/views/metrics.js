// Metrics: watched, all or one's own charts over one x axis, with one cursor; each row appears as it is written.

import {CurveTools, GroupLegend, useCurveSettings} from "../components/curve_controls.js";
import {AddressChoice, AddressSearch, AddressTick, Copyable, Tabs} from "../components/inputs.js";
import {Rate} from "../components/marks.js";
import {Answered, Banner, NotRecorded, Title} from "../components/states.js";
import {number, percent, plural} from "../format.js";
import {step, useKeys} from "../keys.js";
import {useAddress} from "../lib/address.js";
import {useAnswer, useSame} from "../lib/answer.js";
import {html, useMemo} from "../lib/html.js";
import {nameOf} from "../names.js";
import {Distribution} from "./distribution.js";
import {AllCharts, MetricChart, MyCharts, WatchedCharts} from "./metrics_grid.js";
import {metricOf, readMine, searchOf, tabOf} from "./metrics_keys.js";

const GRIDS = {watch: WatchedCharts, all: AllCharts, mine: MyCharts};
const LINES = Object.entries({runs: "a line for each run", conditions: "mean of each condition"});
const CLIP = "the y axis shows the middle 98 % of the values";
const FULL = "the y axis shows the whole range that was declared for the metric";
const NO_RUNS = /** @type {any[]} */ ([]);
const HEADER = 140; // Height of what stays on top of the page

function Tools({tags, wrong, byCondition, runs}) {
  const {query, patch} = useAddress();
  const tab = tabOf(query);
  const count = readMine(query.keys).length;
  const tabs = Object.entries({watch: "Watch", all: "All", mine: count ? `Mine ${count}` : "Mine"});
  // What is searched for may be no watched metric.
  const resets = tab === "watch" ? {tab: "all"} : {};
  const options = [["", "all tags"], ...tags.map((tag) => [tag, `tag ${tag}`])];
  const turn = (key) => patch({tab: key, open: null});
  return html`<div class="tools sticky">
    <${Tabs} label="which charts" options=${tabs} value=${tab} onChoose=${turn} />
    <${AddressSearch} label="search (regex)" resets=${resets} wrong=${wrong} />
    <${AddressChoice} name="tag" label="tag or environment" options=${options} resets=${resets} />
    <${CurveTools} thin=${byCondition && "every seed"}>
      ${runs.length > 1 && html`<${AddressChoice} name="lines" label="lines" options=${LINES} />`}
    <//>
    <${AddressTick} name="clip" title=${CLIP}>without outliers<//>
    <${AddressTick} name="full" title=${FULL}>declared range<//>
  </div>`;
}

function nextSection() {
  const heads = /** @type {HTMLElement[]} */ ([...document.querySelectorAll("h2.section")]);
  const next = heads.find((each) => each.getBoundingClientRect().top > HEADER) || heads[0];
  if (!next) return;
  next.scrollIntoView();
  next.focus();
}

export function Metrics() {
  const {place, query, patch} = useAddress();
  const shared = useCurveSettings();
  const byCondition = query.lines === "conditions";
  const settings = useMemo(() => ({...shared, byCondition}), [shared, byCondition]);
  const answer = useAnswer("metrics", {at: place}, {kinds: ["metrics", "evals"], wait: 3000});
  const body = useSame(answer.data);
  const runs = useSame(body ? body.runs : NO_RUNS);
  const about = runs.length === 1 ? {at: place, x: settings.x} : null;
  const own = useAnswer("run", about, {kinds: ["metrics", "evals", "state", "log"], wait: 3000});
  const facts = useSame(own.data);
  useKeys({
    Escape: ["all of the x axis again", () => settings.zoom && settings.plot.onZoom(null)],
    j: ["next chart", () => step(".chartcard", 1)],
    k: ["previous chart", () => step(".chartcard", -1)],
    g: ["next section", nextSection],
    c: ["lines: runs or conditions", () => patch({lines: byCondition ? null : "conditions"})],
  });
  const {test, wrong} = useMemo(() => searchOf(query.q, query.tag), [query.q, query.tag]);
  const page = {place, runs, settings, marks: facts && own.isCurrent ? facts.marks : null};
  const counts = body && `${plural(body.metrics.length, "metric")} of ${plural(runs.length, "run")}`;
  const conditions = new Map(runs.map(({label, index}) => [index, {name: label, index, hint: "show or hide"}]));
  const open = {metric: body && metricOf(body.metrics, query.open), level: "h2", big: true};
  const grid = GRIDS[tabOf(query)] || WatchedCharts;
  return html`<${Title} title=${nameOf(place)} words=${counts}><${NotRecorded} items=${body && body.missing} /><//>
    ${facts && html`<${RunFacts} facts=${facts} />`}
    <${Tools} tags=${body ? body.tags : []} wrong=${Boolean(wrong)} byCondition=${byCondition} runs=${runs} />
    <${GroupLegend} groups=${[...conditions.values()]} hidden=${settings.hidden} />
    ${wrong && html`<${Banner} kind="down" title="The search">${wrong}<//>`}
    <${Answered} of=${{...answer, data: body}}>
      ${() => html`${query.hist && html`<${Distribution} place=${place} runs=${runs} />`}
        ${query.open && html`<${MetricChart} key=${query.open} ...${open} page=${page} />`}
        <${grid} body=${body} page=${page} test=${test} />`}
    <//>`;
}

const SIGNS = {evaluation: "▽", checkpoint: "▼", resume: "┆"};
// A tile's name says what these count.
const UNITS = ["share", "reward", "tokens/s"];

function Tile({tile: {key, name, unit, value, step, low, high, n}}) {
  const {linkTo} = useAddress();
  const plain = unit === "share" ? percent(value) : number(value);
  const rate = html`<${Rate} rate=${value} n=${n} low=${low} high=${high} digits=${1} />`;
  const figure = low === undefined ? html`<b>${plain}</b>` : rate;
  return html`<a class="tile quiet" href=${linkTo({open: key})} title=${`${key}: open the chart`}>
    <span class="muted">${name}</span>
    <span>${figure}${!UNITS.includes(unit) && html` <small class="muted">${unit}</small>`}</span>
    <small class="muted">step ${step}</small>
  </a>`;
}

function RunFacts({facts: {tiles, command, marks}}) {
  const entry = ([kind, sign]) => {
    const n = marks.filter((mark) => mark.kind === kind).length;
    const content = html`<span aria-hidden="true">${sign}</span> ${plural(n, kind)}`;
    return n > 0 && html`<span class=${`mark ${kind}`} key=${kind}>${content}</span>`;
  };
  const all = Object.entries(SIGNS).map(entry);
  return html`<section class="runfacts" aria-label="this run">
    <div class="tiles">${tiles.map((tile) => html`<${Tile} key=${tile.key} tile=${tile} />`)}</div>
    ${command && html`<${Copyable} text=${command} label="command that launched it" message="Command copied" />`}
    ${marks.length > 0 && html`<p class="small muted marks" aria-label="marks on the charts">${all}</p>`}
  </section>`;
}
