// The curve of one metric by condition, and the paired difference to the baseline, as the server computed them.

import {conditionLines, countsOf, differenceLines} from "../charts/curve_lines.js";
import {Chart} from "../components/chart.js";
import {AddressTick, AxisChoice, MetricChoice, SmoothingChoice, WholeRange} from "../components/curve_controls.js";
import {smoothOf, useHidden, zoomOf, zoomTo} from "../components/curve_controls.js";
import {SignButton} from "../components/inputs.js";
import {Legend} from "../components/marks.js";
import {useKeys} from "../keys.js";
import {useAddress} from "../lib/address.js";
import {useAnswer} from "../lib/answer.js";
import {useCurves} from "../lib/curves.js";
import {html, useMemo} from "../lib/html.js";
import {link} from "../router.js";
import {why} from "../why.js";
import {openRollouts} from "./reading.js";

/** @type {[string, string]} */
export const USUAL = ["auto", "smoothed as in the report"];

// Return what the mean and its band are of.
export function levelWords(body, counted) {
  const early = body.conditions.some((each) => each.of === "all");
  const amount = body.smoothing.startsWith("ema") ? `weight ${body.smoothing.slice(4)}` : `over ${body.smooth} steps`;
  return [
    ` mean of ${early ? "all runs, as far as all came" : "the finished runs"}`,
    body.smoothing !== "none" && `moving average ${amount}, faint: the steps' own values`,
    body.conditions.some((each) => each.band.length) ? "band: 95 % interval over seeds" : "no band below 3 seeds",
    counted && "strip: how many seeds",
    body.note,
  ]
    .filter(Boolean)
    .join("; ");
}

function differenceWords(body) {
  const band = body.differences.some((each) => each.band.length);
  const words = band ? "band: 95 % interval over seeds at each step alone" : "no band below 3 pairs";
  return `mean of the pairs, n: how many; ${words}, no verdict`;
}

// Return the metrics to look at first, the chosen one, and how to choose another.
function useMetric(campaign) {
  const {place, query, patch} = useAddress();
  const {data} = useAnswer("metrics", {at: place}, {kinds: ["metrics", "evals"], wait: 4000});
  // Before anything can be compared there is no primary metric yet: the first that is worth watching.
  const usual = campaign.metric || (data && (data.watch[0] || (data.metrics[0] || {}).key)) || null;
  const sets = (campaign.sets || []).map((name) => `eval/${name}/correct_rate`);
  const known = [campaign.metric, ...sets, ...(data ? data.watch : [])];
  const watched = [...new Set(known.filter(Boolean))];
  const rest = data ? data.metrics.map((each) => each.key).filter((key) => !watched.includes(key)) : [];
  const choose = (key) => patch({key: key === usual ? null : key});
  return {metric: query.key || usual, watched, rest, choose, isKnown: Boolean(data)};
}

/** @param {{campaign: any}} props the answer of /api/campaign */
export function Curves({campaign}) {
  const {place, query, patch} = useAddress();
  const {metric, watched, rest, choose, isKnown} = useMetric(campaign);
  const zoom = useMemo(() => zoomOf(query.zoom), [query.zoom]);
  const smooth = smoothOf(query.smooth, USUAL[0]);
  const question = {at: place, key: metric, x: query.x || "step", smooth};
  const {body, error, retry} = useCurves("curves", question, zoom, metric !== null);
  const move = (by) => choose(watched[(watched.indexOf(metric || "") + by + watched.length) % watched.length]);
  useKeys({
    Escape: ["all of the x axis again", () => query.zoom && patch(zoomTo(null), {replace: true})],
    l: ["next metric", () => move(1)],
    h: ["previous metric", () => move(-1)],
  });
  return html`<section>
    <h2>Curves</h2>
    <div class="tools">
      <${MetricChoice} metric=${metric} watched=${watched} rest=${rest} onChoose=${choose} />
      <${AxisChoice} /><${SmoothingChoice} usual=${USUAL} />
      <${AddressTick} name="logx">log x<//><${AddressTick} name="logy">log y<//>
      <${AddressTick} name="thin">every seed<//><${WholeRange} />
      <a href=${link("metrics", place)}>all metrics</a>
    </div>
    <${CurvePair}
      campaign=${campaign}
      metric=${metric}
      body=${body}
      error=${error}
      retry=${retry}
      zoom=${zoom}
      empty=${isKnown && !metric}
    />
  </section>`;
}

/**
 * The legend, the level and the difference to the baseline.
 * @param {{campaign: any, metric: string | null, body: any, error: any, retry: () => void, zoom: number[] | null,
 *   empty: boolean}} props
 */
function CurvePair({campaign, metric, body, error, retry, zoom, empty}) {
  const {query, patch} = useAddress();
  const {hidden, toggle} = useHidden(",");
  const thin = query.thin === "1";
  const [levels, apart, counts] = useMemo(() => {
    if (!body) return [empty ? [] : null, null, null];
    const isShown = ({index}) => !hidden.has(String(index));
    const conditions = body.conditions.filter(isShown);
    return [conditionLines({...body, conditions}, thin), differenceLines(body).filter(isShown), countsOf(conditions)];
  }, [body, thin, hidden, empty]);
  const share = body && body.share;
  const conditions = body ? body.conditions : [];
  const groups = conditions.map(({label, index}) => ({name: label, index, hidden: hidden.has(String(index))}));
  const shared = {
    x: (body && body.x) || "step",
    ...{height: 290, group: "campaign", zoom, logX: query.logx === "1", error, retry},
    onZoom: (range) => patch(zoomTo(range), {replace: true}),
  };
  const places = campaign.runs.map((run) => run.place);
  const explain = () => metric && why(metric, places);
  const tools = html`<${SignButton} label="Why?" hint="what this number means" onPress=${explain}>Why?<//>`;
  const about = (body && body.about) || {};
  const baseline = conditions.length ? conditions[0].label : "the baseline";
  const key = body ? body.key : metric || "";
  const hide = ({index}) => toggle(String(index));
  return html`${groups.length > 1 && html`<${Legend} groups=${groups} onToggle=${hide} />`}
    <div class="two">
      <${Chart}
        ...${shared}
        title=${key}
        onStep=${openRollouts({metric: key, x: shared.x, lines: levels, runs: campaign.runs})}
        words=${body && levelWords(body, counts !== null)}
        lines=${levels}
        share=${share}
        unit=${share ? "%" : ""}
        logY=${query.logy === "1"}
        counts=${counts}
        range=${about.range}
        healthy=${about.healthy}
        tools=${tools}
        emptyWords=${empty ? "Nothing was recorded yet" : ""}
      />
      ${
        conditions.length !== 1 &&
        html`<${Chart}
          ...${shared}
          title=${`${key}: difference to ${baseline}`}
          words=${body && body.differences.length > 0 && differenceWords(body)}
          lines=${empty ? [] : apart}
          share=${share ? "points" : false}
          unit=${share ? "points" : ""}
          zero=${true}
          emptyWords="No pair of runs has come so far yet"
        />`
      }
    </div>`;
}
