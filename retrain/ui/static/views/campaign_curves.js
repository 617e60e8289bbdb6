// The curve of one metric by condition, and the paired difference to the baseline, as the server computed them.

import {columnsOf} from "../charts/data.js";
import {X_CHOICES} from "../charts/ticks.js";
import {Chart} from "../components/chart.js";
import {Choice, Tick} from "../components/inputs.js";
import {Legend} from "../components/marks.js";
import {isCopy} from "../copy.js";
import {useKeys} from "../keys.js";
import {useAddress} from "../lib/address.js";
import {useAnswer} from "../lib/answer.js";
import {useCurves, zoomOf, zoomTo} from "../lib/curves.js";
import {html, useMemo} from "../lib/html.js";
import {link} from "../router.js";
import {why} from "../why.js";
import {openRollouts} from "./reading.js";

/** @typedef {import("../charts/data.js").Line} Line */

/** @type {[string, string][]} */
export const SMOOTHINGS = [
  ["", "smoothed as in the report"],
  ["1", "no smoothing"],
  ...[5, 10, 20, 50, 100].map((steps) => /** @type {[string, string]} */ ([`${steps}`, `mean of ${steps} steps`])),
  ...["0.6", "0.9", "0.99"].map((weight) => /** @type {[string, string]} */ ([`ema:${weight}`, `EMA ${weight}`])),
];

function isSparse(key) {
  return /^eval\//.test(key);
}

/**
 * Return the lines of an answer of /api/curves: the mean of every condition with its band, and with `thin` every run.
 * @returns {Line[]}
 */
export function linesOf(body, thin) {
  const sparse = isSparse(body.key);
  const raw = (each) => (body.smoothing === "none" || thin ? null : each.raw);
  const run = (each, one) => ({
    ...{name: `${each.label}, seed ${one.seed}`, index: each.index, kind: /** @type {"thin"} */ ("thin"), sparse},
    ...columnsOf(one.points),
  });
  const mean = (each) => ({
    ...{name: each.label, index: each.index, kind: /** @type {"mean"} */ ("mean"), sparse, n: each.n, raw: raw(each)},
    ...columnsOf(each.mean, each.band),
  });
  const runs = thin ? body.conditions.flatMap((each) => each.runs.map((one) => run(each, one))) : [];
  return [...runs, ...body.conditions.filter((each) => each.mean.length).map(mean)];
}

// Return how many seeds of each condition there are from each x on.
export function countsOf(body) {
  return body.conditions.map(({index, count}) => ({
    index,
    x: count.map((one) => one[0]),
    n: count.map((one) => one[1]),
  }));
}

// Return the paired differences as lines.
function differenceLines(body) {
  return body.differences.map(({label, index, mean, band, n}) => ({
    ...{name: label, index, kind: /** @type {"mean"} */ ("mean"), sparse: isSparse(body.key), n},
    ...columnsOf(mean, band),
  }));
}

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

/** @param {{metric: string | null, watched: string[], rest: string[], choose: (key: string) => void}} props */
export function MetricChoice({metric, watched, rest, choose}) {
  const chosen = metric && ![...watched, ...rest].includes(metric) ? [metric] : [];
  const option = (key) => html`<option key=${key} value=${key} selected=${key === metric}>${key}</option>`;
  const group = ([label, keys]) => keys.length > 0 && html`<optgroup label=${label}>${keys.map(option)}</optgroup>`;
  const groups = Object.entries({watched, all: rest, chosen});
  const change = (event) => choose(event.target.value);
  return html`<select aria-label="metric" class="metric" value=${metric} onChange=${change}>${groups.map(group)}</select>`;
}

/** @param {{campaign: any}} props the answer of /api/campaign */
export function Curves({campaign}) {
  const {place, query, patch} = useAddress();
  const {metric, watched, rest, choose, isKnown} = useMetric(campaign);
  const zoom = useMemo(() => zoomOf(query), [query.zoom]);
  const x = query.x || "step";
  const smooth = (!isCopy() && query.smooth) || null;
  const {body, error, retry} = useCurves(metric ? {at: place, key: metric, x, smooth} : null, zoom);
  const whole = () => query.zoom && patch({zoom: null}, {replace: true});
  const move = (by) => choose(watched[(watched.indexOf(metric || "") + by + watched.length) % watched.length]);
  useKeys({
    Escape: ["all of the x axis again", whole],
    l: ["next metric", () => move(1)],
    h: ["previous metric", () => move(-1)],
  });
  const known = SMOOTHINGS.some(([value]) => value === (query.smooth || ""));
  const smoothings = known ? SMOOTHINGS : [...SMOOTHINGS, [query.smooth, query.smooth]];
  const choice = (label, options, name, usual) => {
    const set = (value) => patch({[name]: value === usual ? null : value, ...(name === "x" ? {zoom: null} : {})});
    return html`<${Choice} label=${label} options=${options} value=${query[name] || usual} onChoose=${set} />`;
  };
  const tick = (name, text) => {
    const set = (on) => patch({[name]: on ? 1 : null});
    return html`<${Tick} checked=${query[name] === "1"} onChoose=${set}>${text}<//>`;
  };
  return html`<section>
    <h2>Curves</h2>
    <div class="tools">
      <${MetricChoice} metric=${metric} watched=${watched} rest=${rest} choose=${choose} />
      ${choice("x axis", X_CHOICES, "x", "step")} ${!isCopy() && choice("smoothing", smoothings, "smooth", "")}
      ${tick("logx", "log x")}${tick("logy", "log y")}${tick("thin", "every seed")}
      ${query.zoom && html`<button type="button" onClick=${whole}>whole range</button>`}
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
  const hidden = (query.hide || "").split(",").filter(Boolean);
  const thin = query.thin === "1";
  const [levels, apart, counts] = useMemo(() => {
    if (!body) return [empty ? [] : null, null, null];
    const shown = (each) => !hidden.includes(String(each.index));
    const some = body.conditions.some((each) => each.mean.length);
    return [
      linesOf(body, thin || !some).filter(shown),
      differenceLines(body).filter(shown),
      countsOf(body).filter(shown),
    ];
  }, [body, thin, query.hide, empty]);
  const share = body && body.share;
  const conditions = body ? body.conditions : [];
  const groups = conditions.map(({label, index}) => ({name: label, index, hidden: hidden.includes(String(index))}));
  const toggle = (name) => {
    const {index} = groups.find((each) => each.name === name) || {index: 0};
    const next = hidden.includes(`${index}`) ? hidden.filter((each) => each !== `${index}`) : [...hidden, `${index}`];
    patch({hide: next.join(",") || null});
  };
  const shared = {
    x: (body && body.x) || "step",
    ...{height: 290, group: "campaign", zoom, logX: query.logx === "1", error, retry},
    onZoom: (range) => patch(zoomTo(range), {replace: true}),
  };
  const explain = () =>
    metric &&
    why(
      metric,
      campaign.runs.map((run) => run.place),
    );
  const tools = html`<button type="button" class="bare" title="what this number means" onClick=${explain}>Why?</button>`;
  const about = (body && body.about) || {};
  const baseline = conditions.length ? conditions[0].label : "the baseline";
  const counted = conditions.some((each) => each.runs.length > 1);
  const key = body ? body.key : metric || "";
  return html`${groups.length > 1 && html`<${Legend} groups=${groups} onToggle=${toggle} />`}
    <div class="two">
      <${Chart}
        ...${shared}
        title=${key}
        onStep=${openRollouts({metric: key, x: shared.x, lines: levels, runs: campaign.runs})}
        words=${body && levelWords(body, counted)}
        lines=${levels}
        share=${share}
        unit=${share ? "%" : ""}
        logY=${query.logy === "1"}
        counts=${counted ? counts : null}
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
