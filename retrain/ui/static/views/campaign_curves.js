// The curve of one metric by condition, and the paired difference to the baseline, as the server computed them.

import {conditionLines, countsOf, differenceLines} from "../charts/curve_lines.js";
import {Chart} from "../components/chart.js";
import {AS_IN_REPORT, CurveTools, GroupLegend, MetricChoice} from "../components/curve_controls.js";
import {useCurveSettings, useMetric} from "../components/curve_controls.js";
import {signButton} from "../components/inputs.js";
import {useKeys} from "../keys.js";
import {link, useAddress} from "../lib/address.js";
import {useCurves} from "../lib/answer.js";
import {html, useMemo} from "../lib/html.js";
import {why} from "../why.js";
import {cycled, openRollouts} from "./reading.js";

function levelWords({conditions, smoothing, smooth, note}, counted) {
  const early = conditions.some((each) => each.of === "all");
  const amount = smoothing.startsWith("ema") ? `weight ${smoothing.slice(4)}` : `over ${smooth} steps`;
  const parts = [
    ` mean of ${early ? "all runs, as far as all came" : "the finished runs"}`,
    smoothing !== "none" && `moving average ${amount}, faint: the steps' own values`,
    conditions.some((each) => each.band.length) ? "band: 95 % interval over seeds" : "no band below 3 seeds",
    counted && "strip: how many seeds",
    note,
  ];
  return parts.filter(Boolean).join("; ");
}

function differenceWords(body) {
  const band = body.differences.some((each) => each.band.length);
  const words = band ? "band: 95 % interval over seeds at each step alone" : "no band below 3 pairs";
  return `mean of the pairs, n: how many; ${words}, no verdict`;
}

const NO_BODY = {x: "step", share: false, about: null, conditions: [], differences: []};

// The mean of each condition or group of /api/curves, without the hidden ones; a click on a step opens rollouts of
// `runs`.
export function ConditionChart({body, metric, settings, runs = [], ...more}) {
  const {thin, hidden, plot} = settings;
  const [lines, counts] = useMemo(() => {
    const conditions = body ? body.conditions.filter(({index}) => !hidden.has(index)) : [];
    return body ? [conditionLines({...body, conditions}, thin), countsOf(conditions)] : [null, null];
  }, [body, thin, hidden]);
  const {key, x, share, about} = body || {...NO_BODY, key: metric || ""};
  const {range, healthy} = about || {range: null, healthy: null};
  const options = {lines, counts, x, share, range, healthy, unit: share ? "%" : "", ...plot, ...more};
  const words = body && levelWords(body, counts !== null);
  const onStep = openRollouts({metric: key, x, lines, runs});
  return html`<${Chart} title=${key} words=${words} ...${options} onStep=${onStep} />`;
}

function DifferenceChart({body, metric, settings: {hidden, plot}, ...more}) {
  const lines = useMemo(() => body && differenceLines(body).filter(({index}) => !hidden.has(index)), [body, hidden]);
  const {key, x, share, conditions, differences} = body || {...NO_BODY, key: metric || ""};
  const baseline = conditions.length ? conditions[0].label : "the baseline";
  const points = share ? "points" : "";
  const options = {x, lines, share: points, unit: points, zero: true, ...plot, logY: false, ...more};
  const words = differences.length > 0 && differenceWords(body);
  return html`<${Chart} title=${`${key}: difference to ${baseline}`} words=${words} ...${options}
    emptyWords="No pair of runs has come so far yet" />`;
}

export function Curves({campaign}) {
  const {place, query, patch} = useAddress();
  const settings = useCurveSettings(AS_IN_REPORT);
  // Before anything can be compared there is no primary metric yet.
  const first = [campaign.metric, ...(campaign.sets || []).map((name) => `eval/${name}/correct_rate`)];
  const of = useMetric(place, first);
  const {metric, usual, watched, isKnown} = of;
  const {x, smooth, zoom} = settings;
  const {body, error, retry} = useCurves("curves", {at: place, key: metric, x, smooth}, zoom, metric !== null);
  const move = (by) => () => {
    const key = cycled(watched, metric, by);
    patch({key: key === usual ? null : key});
  };
  useKeys({
    Escape: ["all of the x axis again", () => query.zoom && settings.plot.onZoom(null)],
    l: ["next metric", move(1)],
    h: ["previous metric", move(-1)],
  });
  const conditions = body ? body.conditions : [];
  const groups = conditions.map(({label, index}) => ({name: label, index}));
  const explain = () => metric && why(metric, campaign.runs);
  const tools = signButton("Why?", "Why?", explain, {hint: "what this number means"});
  const shared = {body, metric, settings, error, retry, height: 290, group: "campaign"};
  if (isKnown && !metric)
    return html`<section><h2>Curves</h2><p class="muted">Nothing was recorded yet.</p></section>`;
  return html`<section>
    <h2>Curves</h2>
    <div class="tools">
      <${MetricChoice} of=${of} /><${CurveTools} usual=${AS_IN_REPORT} thin="every seed" />
      <a href=${link("metrics", place)}>all metrics</a>
    </div>
    <${GroupLegend} groups=${groups} hidden=${settings.hidden} />
    <div class="two">
      <${ConditionChart} ...${shared} runs=${campaign.runs} tools=${tools} />
      ${conditions.length !== 1 && html`<${DifferenceChart} ...${shared} />`}
    </div>
  </section>`;
}
