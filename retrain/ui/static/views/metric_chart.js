// One chart of the Metrics page: the runs of a metric, or its conditions with bands; read only while it is in sight.

import {MOST_BANDS, conditionLines, countsOf, runLines} from "../charts/curve_lines.js";
import {Chart} from "../components/chart.js";
import {zoomTo} from "../components/curve_controls.js";
import {Field, SignButton} from "../components/inputs.js";
import {useAddress} from "../lib/address.js";
import {say} from "../lib/browser.js";
import {useCurves} from "../lib/curves.js";
import {html, useMemo, useRef} from "../lib/html.js";
import {useInSight} from "../lib/sight.js";
import {why} from "../why.js";
import {readMine, runFilter, writeMine} from "./metrics_keys.js";
import {openRollouts} from "./reading.js";

/**
 * @typedef {import("./metrics_keys.js").Metric} Metric
 * @typedef {object} Settings what the address says of all charts
 * @property {string} x
 * @property {string} smooth
 * @property {boolean} byCondition
 * @property {boolean} thin every seed beside the means
 * @property {number[] | null} zoom
 * @property {Set<string>} hidden labels of conditions
 * @property {{logX: boolean, logY: boolean, clip: boolean, full: boolean}} plot
 * @typedef {{place: string, runs: any[], settings: Settings, marks: any[] | null}} Page
 */

/** @param {{metric: Metric, big: boolean, mine: any, runs: any[]}} props */
function Tools({metric: {key, histogram}, big, mine, runs}) {
  const {query, patch} = useAddress();
  const pin = () => {
    const tab = query.tab || (query.keys ? null : "watch");
    patch({keys: writeMine([...readMine(query.keys), {key, only: ""}]), tab: tab === "mine" ? null : tab});
    say(`${key} is in Mine`);
  };
  const open = () => patch({open: big ? null : key});
  const places = runs.map((run) => run.place);
  const explain = () => why(key, places);
  const size = big ? {label: "close the large chart", hint: "close"} : {label: `${key} large`, hint: "large"};
  const distribution = () => patch({hist: histogram, step: null});
  return html`${mine || html`<${SignButton} label=${`add ${key} to Mine`} hint="add to Mine" onPress=${pin}>☆<//>`}
    ${
      histogram &&
      html`<${SignButton} label=${`distribution of ${key}`} hint="distribution over rollouts" onPress=${distribution}
        >▥<//
      >`
    }
    <${SignButton} ...${size} onPress=${open}>${big ? "×" : "⤢"}<//>
    <${SignButton} label=${`why? ${key}`} hint="what this number means" onPress=${explain}>Why?<//>`;
}

// Return what a chart draws of an answer, and what there is to say of its rows.
function drawing(body, metric, {byCondition, thin, hidden}, only) {
  const fits = runFilter(only);
  const keeps = (label, name) => !hidden.has(label) && fits(name);
  if (!byCondition) {
    const failed = body.runs.find((run) => run.error);
    const lines = runLines(body.runs, metric, keeps);
    return {lines, counts: null, notes: body.runs.map((run) => run.note), emptyWords: failed && failed.error};
  }
  const conditions = body.conditions.filter(({label}) => keeps(label, label));
  return {lines: conditionLines({...body, conditions}, thin), counts: countsOf(conditions), notes: [body.note]};
}

/**
 * @param {object} props
 * @param {Metric} props.metric
 * @param {Page} props.page
 * @param {"h2" | "h3"} [props.level]
 * @param {boolean} [props.big]
 * @param {any} [props.mine] buttons of a chart of one's own
 * @param {string} [props.only] the filter of its runs
 * @param {(only: string) => void} [props.onFilter]
 */
export function MetricChart({metric, page, level = "h3", big = false, mine, only = "", onFilter}) {
  const {patch} = useAddress();
  const root = useRef(null);
  const inSight = useInSight(root);
  const {place, runs, settings, marks} = page;
  const {x, smooth, byCondition, zoom} = settings;
  const {key, unit, definition, healthy, range, spread} = metric;
  const ends =
    spread && !byCondition && smooth === "none" && runs.length <= MOST_BANDS ? [spread.min, spread.max] : [];
  const params = {at: place, key: byCondition ? key : [key, ...ends], x, smooth};
  const {body, error, retry} = useCurves(byCondition ? "curves" : "columns", params, zoom, inSight);
  const made = useMemo(() => body && drawing(body, metric, settings, only), [body, metric, settings, only]);
  const words = [unit === "share" ? "" : unit, healthy && healthy.text ? `healthy: ${healthy.text}` : ""];
  const caption = [...new Set([...words, ...(made ? made.notes : [])])].filter(Boolean).join(" · ");
  const onStep = openRollouts({metric: key, x, lines: made && made.lines, runs});
  const onZoom = (part) => patch(zoomTo(part), {replace: true});
  const options = {
    ...{title: key, hint: definition, words: caption, level, error, retry, onZoom, onStep},
    ...{x, zoom, range, healthy, marks},
    ...{lines: made && made.lines, counts: made && made.counts, emptyWords: made && made.emptyWords},
    ...{height: big ? 460 : 172, group: "metrics", share: unit === "share", unit: unit === "share" ? "%" : ""},
    ...settings.plot,
  };
  const filter = {label: `runs in this chart of ${key}`, class: "only", placeholder: "all runs; or a filter …"};
  // Out of sight it stays as it was.
  const seen = useRef(options);
  if (inSight) seen.current = options;
  return html`<div class=${big ? "big" : "chartplace"} ref=${root}>
    <${Chart}
      ...${seen.current}
      id=${null}
      tools=${html`<${Tools} metric=${metric} big=${big} mine=${mine} runs=${runs} />`}
    >
      ${onFilter && html`<${Field} ...${filter} value=${only} onEnter=${onFilter} />`}
    <//>
  </div>`;
}
