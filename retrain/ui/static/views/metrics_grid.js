// The charts of the Metrics page: those that are watched, all by section and group, and one's own.

import {MOST_BANDS, conditionLines, countsOf, runLines} from "../charts/curve_lines.js";
import {Chart} from "../components/chart.js";
import {button, signButton} from "../components/inputs.js";
import {Empty} from "../components/states.js";
import {plural} from "../format.js";
import {useAddress} from "../lib/address.js";
import {useCurves} from "../lib/answer.js";
import {showToast} from "../lib/browser.js";
import {html, useElement, useMemo, useRef} from "../lib/html.js";
import {useInSight} from "../lib/width.js";
import {metricOf, readMine, sectionsOf, tabOf, writeMine} from "./metrics_keys.js";
import {openRollouts} from "./reading.js";
import {why} from "../why.js";

function Charts({metrics, page, level}) {
  const chart = (metric) => html`<${MetricChart} key=${metric.key} metric=${metric} page=${page} level=${level} />`;
  return html`<div class="charts">${metrics.map(chart)}</div>`;
}

export function WatchedCharts({body, page, test}) {
  const metrics = body.watch.map((key) => metricOf(body.metrics, key)).filter(test);
  if (metrics.length) return html`<${Charts} metrics=${metrics} page=${page} level="h2" />`;
  return html`<${Empty} title="None of the watched metrics is here">All has every key that these runs wrote.<//>`;
}

export function AllCharts({body, page, test}) {
  const sections = sectionsOf(body.metrics.filter(test));
  const words = "The search looks at keys, sections, groups and the names that other tools use.";
  if (!sections.length) return html`<${Empty} title="No metric matches">${words}<//>`;
  const many = (groups) => groups.reduce((sum, [, metrics]) => sum + metrics.length, 0);
  const entry = ([section, groups]) => {
    const go = () => {
      const head = /** @type {HTMLElement} */ (document.getElementById(`section ${section}`));
      head.scrollIntoView();
      head.focus();
    };
    return button(html`${section} <small class="muted">${many(groups)}</small>`, go, {key: section});
  };
  const group = ([name, metrics], at, groups) => html`<div key=${name}>
    ${name && (groups.length > 1 || !metrics[0].definition) && html`<h3 class="group">${name}</h3>`}
    <${Charts} metrics=${metrics} page=${page} level="h3" />
  </div>`;
  const part = ([section, groups]) => html`<section key=${section}>
    <h2 class="section" id=${`section ${section}`} tabindex="-1">
      ${section}<small>${plural(many(groups), "metric")}</small>
    </h2>
    ${groups.map(group)}
  </section>`;
  const index = html`<nav class="sections" aria-label="sections">${sections.map(entry)}</nav>`;
  return html`${sections.length > 1 && index}${sections.map(part)}`;
}

function MyTools({keys, at}) {
  const {patch} = useAddress();
  const key = keys[at];
  const others = keys.filter((each) => each !== key);
  const put = (to) => () => patch({keys: writeMine([...others.slice(0, to), key, ...others.slice(to)])});
  const remove = () => patch({keys: writeMine(others), tab: "mine"});
  const [forward, back] = [`move ${key} forward`, `move ${key} back`];
  return html`${signButton("◂", forward, put(at - 1), {hint: "move forward", disabled: at === 0})}
  ${signButton("▸", back, put(at + 1), {hint: "move back", disabled: at === others.length})}
  ${signButton("✕", `take ${key} out of Mine`, remove, {hint: "take out"})}`;
}

export function MyCharts({body, page, test}) {
  const keys = readMine(useAddress().query.keys);
  const chart = (key, at) => {
    const metric = metricOf(body.metrics, key);
    const mine = html`<${MyTools} keys=${keys} at=${at} />`;
    return test(metric) && html`<${MetricChart} key=${key} metric=${metric} page=${page} level="h2" mine=${mine} />`;
  };
  if (keys.length) return html`<div class="charts">${keys.map(chart)}</div>`;
  return html`<${Empty} title="Nothing chosen yet">
    ☆ on a chart puts it here. The address holds your choice: keep it as a bookmark, or send it.
  <//>`;
}

function Tools({metric: {key, histogram}, big, mine, runs}) {
  const {query, patch} = useAddress();
  const pin = () => {
    const tab = tabOf(query);
    patch({keys: writeMine([...new Set([...readMine(query.keys), key])]), tab: tab === "mine" ? null : tab});
    showToast(`${key} is in Mine`);
  };
  const distribution = () => patch({hist: histogram, step: null});
  const size = () => patch({open: big ? null : key});
  const [sign, label, hint] = big ? ["×", "close the large chart", "close"] : ["⤢", `${key} large`, "large"];
  return html`${mine || signButton("☆", `add ${key} to Mine`, pin, {hint: "add to Mine"})}
    ${histogram && signButton("▥", `distribution of ${key}`, distribution, {hint: "distribution over rollouts"})}
    ${signButton(sign, label, size, {hint})}
    ${signButton("Why?", `why? ${key}`, () => why(key, runs), {hint: "what this number means"})}`;
}

// Return what a chart draws of an answer, and what there is to say of its rows.
function drawing(body, metric, {byCondition, thin, hidden}) {
  const keeps = ({index}) => !hidden.has(index);
  if (byCondition) {
    const conditions = body.conditions.filter(keeps);
    return {lines: conditionLines({...body, conditions}, thin), counts: countsOf(conditions), notes: [body.note]};
  }
  const {error} = body.runs.find((run) => run.error) || {};
  const notes = body.runs.map((run) => run.note);
  return {lines: runLines(body.runs, metric, keeps), counts: null, notes, emptyWords: error};
}

// `page`: {place, runs, settings, marks}; `mine`: buttons of a chart of one's own.
export function MetricChart({metric, page, level = "h3", big = false, mine = null}) {
  const {place, runs, settings, marks} = page;
  const root = useElement();
  const inSight = useInSight(root);
  const {x, smooth, byCondition, zoom, plot} = settings;
  const {key, unit, definition: hint, healthy, range, spread} = metric;
  const hasBand = spread && !byCondition && smooth === "none" && runs.length <= MOST_BANDS;
  const params = {at: place, key: hasBand ? [key, spread.min, spread.max] : byCondition ? key : [key], x, smooth};
  const {body, error, retry} = useCurves(byCondition ? "curves" : "columns", params, zoom, inSight);
  const made = useMemo(() => body && drawing(body, metric, settings), [body, metric, settings]);
  const {lines, counts, emptyWords, notes} = made || {lines: null, notes: []};
  const facts = [unit === "share" ? "" : unit, healthy && healthy.text ? `healthy: ${healthy.text}` : "", ...notes];
  const share = unit === "share";
  const options = {
    ...{title: key, hint, words: [...new Set(facts)].filter(Boolean).join(" · "), level, error, retry},
    ...{lines, counts, emptyWords, x, range, healthy, marks, onStep: openRollouts({metric: key, x, lines, runs})},
    ...{height: big ? 460 : 172, group: "metrics", share, unit: share ? "%" : "", ...plot},
  };
  // Out of sight it stays as it was.
  const seen = useRef(options);
  if (inSight) seen.current = options;
  const tools = html`<${Tools} metric=${metric} big=${big} mine=${mine} runs=${runs} />`;
  return html`<div class=${big ? "big" : "chartplace"} data-key=${key} ref=${root}>
    <${Chart} ...${seen.current} tools=${tools} />
  </div>`;
}
