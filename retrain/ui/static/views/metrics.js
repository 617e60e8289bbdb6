// Metrics: watched, all or one's own charts over one x axis, with one cursor; each row appears as it is written.

import {AddressTick, AxisChoice, SmoothingChoice, WholeRange} from "../components/curve_controls.js";
import {smoothOf, useHidden, zoomOf, zoomTo} from "../components/curve_controls.js";
import {Choice, SearchField, Tabs} from "../components/inputs.js";
import {Legend} from "../components/marks.js";
import {Answered, Banner, NotRecorded} from "../components/states.js";
import {plural} from "../format.js";
import {step, useKeys} from "../keys.js";
import {useAddress} from "../lib/address.js";
import {useAnswer, useSame} from "../lib/answer.js";
import {html, useEffect, useMemo, useRef, useState} from "../lib/html.js";
import {nameOf} from "../names.js";
import {ownerOf} from "../places.js";
import {Distribution} from "./distribution.js";
import {AllCharts, MyCharts, OpenChart, WatchedCharts} from "./metrics_grid.js";
import {readMine, searchOf} from "./metrics_keys.js";
import {RunFacts} from "./run_facts.js";

/** @typedef {import("./metric_chart.js").Settings} Settings */

const TABS = {watch: "Watch", all: "All", mine: "Mine"};
const FOLLOWED = {kinds: ["metrics", "evals"], wait: 3000};
const HEADER = 140; // Height of what stays on top of the page

/**
 * @param {Record<string, string | undefined>} query
 * @returns {Settings}
 */
function useSettings({x = "step", smooth: chosen, lines, thin, zoom, logx, logy, clip, full}) {
  const smooth = smoothOf(chosen);
  const {hidden} = useHidden("|");
  return useMemo(
    () => ({
      ...{x, smooth, byCondition: lines === "conditions", thin: thin === "1", zoom: zoomOf(zoom)},
      hidden,
      plot: {logX: logx === "1", logY: logy === "1", clip: clip === "1", full: full === "1"},
    }),
    [x, smooth, lines, thin, zoom, hidden, logx, logy, clip, full],
  );
}

/** @param {Record<string, string | undefined>} query */
function tabOf({tab = "", keys}) {
  if (tab in TABS) return tab;
  return keys ? "mine" : "watch";
}

// Return the last numbers, command and marks of a run, where the place holds one alone.
function useFacts(place, runs, x) {
  const answer = useAnswer("run", runs.length === 1 ? {at: place, x} : null, {
    kinds: [...FOLLOWED.kinds, "state", "log"],
    wait: FOLLOWED.wait,
  });
  const facts = useSame(answer.data);
  return {facts, marks: facts && answer.isCurrent ? facts.marks : null};
}

// Return what this kind of directory does not hold, of a run that stands alone.
function useMissing(place) {
  const [missing, setMissing] = useState(/** @type {string[]} */ ([]));
  useEffect(() => {
    let left = false;
    ownerOf(place).then((owner) => {
      const summary = /** @type {any} */ (owner);
      if (!left && summary && summary.kind === "run") setMissing(summary.missing);
    });
    return () => {
      left = true;
    };
  }, [place]);
  return missing;
}

/** @param {{settings: Settings, runs: any[]}} props */
function Knobs({settings, runs}) {
  const {patch} = useAddress();
  const lines = [
    ["runs", "a line for each run"],
    ["conditions", "mean of each condition"],
  ];
  const choose = (value) => patch({lines: value === "runs" ? null : value});
  const chosen = settings.byCondition ? "conditions" : "runs";
  const clip = "the y axis shows the middle 98 % of the values";
  const full = "the y axis shows the whole range that was declared for the metric";
  return html`<${AxisChoice} /><${SmoothingChoice} />
    ${runs.length > 1 && html`<${Choice} label="lines" options=${lines} value=${chosen} onChoose=${choose} />`}
    ${settings.byCondition && html`<${AddressTick} name="thin">every seed<//>`}
    <${AddressTick} name="logx">log x<//><${AddressTick} name="logy">log y<//>
    <${AddressTick} name="clip" title=${clip}>without outliers<//>
    <${AddressTick} name="full" title=${full}>declared range<//><${WholeRange} />`;
}

/** @param {{tags: string[], wrong: boolean, settings: Settings, runs: any[]}} props */
function Tools({tags, wrong, settings, runs}) {
  const {query, patch} = useAddress();
  const tab = tabOf(query);
  const count = readMine(query.keys).length;
  const tabs = Object.entries(TABS).map(([key, text]) => [key, key === "mine" && count ? `${text} ${count}` : text]);
  // What is searched for may be no watched metric.
  const search = (changes, options = {}) => patch(tab === "watch" ? {...changes, tab: "all"} : changes, options);
  const typed = (q) => (q ? search({q}, {replace: true}) : patch({q: null}, {replace: true}));
  const tagged = (tag) => (tag ? search({tag}) : patch({tag: null}));
  const tagOptions = [["", "all tags"], ...tags.map((tag) => [tag, `tag ${tag}`])];
  return html`<div class="tools sticky">
    <${Tabs} label="which charts" options=${tabs} value=${tab} onChoose=${(key) => patch({tab: key, open: null})} />
    <${SearchField} label="search (regex)" value=${query.q || ""} onSearch=${typed} wrong=${wrong} />
    ${
      tags.length > 0 &&
      html`<${Choice} label="tag or environment" options=${tagOptions} value=${query.tag || ""} onChoose=${tagged} />`
    }
    <${Knobs} settings=${settings} runs=${runs} />
  </div>`;
}

/** @param {{runs: any[]}} props */
function Conditions({runs}) {
  const {hidden, toggle} = useHidden("|");
  const labels = new Map(runs.map((run) => [run.label, run.index]));
  if (labels.size < 2) return null;
  const groups = [...labels].map(([name, index]) => ({name, index, hidden: hidden.has(name), hint: "show or hide"}));
  return html`<${Legend} groups=${groups} onToggle=${({name}) => toggle(name)} />`;
}

function nextSection() {
  const heads = /** @type {HTMLElement[]} */ ([...document.querySelectorAll("h2.section")]);
  const next = heads.find((each) => each.getBoundingClientRect().top > HEADER) || heads[0];
  if (!next) return;
  next.scrollIntoView();
  next.focus();
}

function useMetricsKeys(settings, mover) {
  const {patch} = useAddress();
  useKeys({
    Escape: ["all of the x axis again", () => settings.zoom && patch(zoomTo(null), {replace: true})],
    j: ["next chart", () => step(".chartcard", 1)],
    k: ["previous chart", () => step(".chartcard", -1)],
    g: ["next section", nextSection],
    c: ["lines: runs or conditions", () => patch({lines: settings.byCondition ? null : "conditions"})],
    h: ["earlier step of the distribution", () => mover.current && mover.current(-1)],
    l: ["later step of the distribution", () => mover.current && mover.current(1)],
  });
}

export function Metrics() {
  const {place, query} = useAddress();
  const settings = useSettings(query);
  const answer = useAnswer("metrics", {at: place}, FOLLOWED);
  const body = useSame(answer.data);
  const runs = useSame(body ? body.runs : []);
  const {facts, marks} = useFacts(place, runs, settings.x);
  const missing = useMissing(place);
  const mover = useRef(/** @type {((by: number) => void) | null} */ (null));
  useMetricsKeys(settings, mover);
  const {test, wrong} = useMemo(() => searchOf(query.q, query.tag), [query.q, query.tag]);
  const grids = {watch: WatchedCharts, all: AllCharts, mine: MyCharts};
  const page = {place, runs, settings, marks};
  const counts = body && `${plural(body.metrics.length, "metric")} of ${plural(runs.length, "run")}`;
  return html`<div class="title">
      <h1>${nameOf(place)}</h1>
      <p class="muted">${counts}</p>
      <${NotRecorded} items=${missing} />
    </div>
    ${facts && html`<${RunFacts} facts=${facts} />`}
    <${Tools} tags=${body ? body.tags : []} wrong=${Boolean(wrong)} settings=${settings} runs=${runs} />
    <${Conditions} runs=${runs} />
    ${wrong && html`<${Banner} kind="down" title="The search">${wrong}<//>`}
    <${Answered} of=${{...answer, data: body}}>
      ${() => html`${query.hist && html`<${Distribution} place=${place} runs=${runs} mover=${mover} />`}
        ${query.open && html`<${OpenChart} body=${body} page=${page} />`}
        <${grids[tabOf(query)]} body=${body} page=${page} test=${test} />`}
    <//>`;
}
