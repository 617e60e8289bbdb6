// One chart of the Metrics page: the runs of a metric, or its conditions with bands; read only while it is in sight.

import {MOST_BANDS, conditionLines, countsOf, runLines} from "../charts/curve_lines.js";
import {Chart} from "../components/chart.js";
import {signButton} from "../components/inputs.js";
import {useAddress} from "../lib/address.js";
import {showToast} from "../lib/browser.js";
import {useCurves} from "../lib/answer.js";
import {html, useElement, useMemo, useRef} from "../lib/html.js";
import {useInSight} from "../lib/width.js";
import {why} from "../why.js";
import {readMine, tabOf, writeMine} from "./metrics_keys.js";
import {openRollouts} from "./reading.js";

function Tools({metric: {key, histogram}, big, mine, runs}) {
  const {query, patch} = useAddress();
  const pin = () => {
    const tab = tabOf(query);
    patch({keys: writeMine([...new Set([...readMine(query.keys), key])]), tab: tab === "mine" ? null : tab});
    showToast(`${key} is in Mine`);
  };
  const distribution = () => patch({hist: histogram, step: null});
  const size = () => patch({open: big ? null : key});
  return html`${mine || signButton("☆", `add ${key} to Mine`, pin, {hint: "add to Mine"})}
    ${histogram && signButton("▥", `distribution of ${key}`, distribution, {hint: "distribution over rollouts"})}
    ${
      big
        ? signButton("×", "close the large chart", size, {hint: "close"})
        : signButton("⤢", `${key} large`, size, {hint: "large"})
    }
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
  return {
    lines: runLines(body.runs, metric, keeps),
    counts: null,
    notes: body.runs.map((run) => run.note),
    emptyWords: error,
  };
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
  const options = {
    ...{title: key, hint, words: [...new Set(facts)].filter(Boolean).join(" · "), level, error, retry},
    ...{lines, counts, emptyWords, x, range, healthy, marks, onStep: openRollouts({metric: key, x, lines, runs})},
    ...{
      height: big ? 460 : 172,
      group: "metrics",
      share: unit === "share",
      unit: unit === "share" ? "%" : "",
      ...plot,
    },
  };
  // Out of sight it stays as it was.
  const seen = useRef(options);
  if (inSight) seen.current = options;
  const tools = html`<${Tools} metric=${metric} big=${big} mine=${mine} runs=${runs} />`;
  return html`<div class=${big ? "big" : "chartplace"} data-key=${key} ref=${root}>
    <${Chart} ...${seen.current} tools=${tools} />
  </div>`;
}
