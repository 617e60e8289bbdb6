// Settings of all views with curves, kept in the address: metric, x axis, smoothing, hidden groups, the part in sight.

import {isCopy} from "../copy.js";
import {X_CHOICES} from "../charts/ticks.js";
import {useAddress} from "../lib/address.js";
import {useAnswer} from "../lib/answer.js";
import {html, useMemo} from "../lib/html.js";
import {AddressChoice, AddressTick, Choice} from "./inputs.js";
import {Legend} from "./marks.js";

const SMOOTHINGS = [
  ["none", "no smoothing"],
  ...["0.6", "0.9", "0.97", "0.99"].map((weight) => [`ema:${weight}`, `EMA ${weight}`]),
  ...[5, 10, 20, 50, 100].map((steps) => [`mean:${steps}`, `mean of ${steps} steps`]),
];
export const AS_IN_REPORT = ["auto", "smoothed as in the report"];

// Return the smoothing of the address; a copy has the usual one alone.
function smoothOf(smooth, usual) {
  return isCopy() || !smooth ? usual : smooth;
}

function zoomOf(text = "") {
  const range = text.split(",").map(Number);
  return range.length === 2 && range.every(Number.isFinite) && range[0] < range[1] ? range : null;
}

export function useCurveSettings([usual] = SMOOTHINGS[0]) {
  const {query, patch} = useAddress();
  const {x = "step", smooth, zoom, hide = "", thin, logx, logy, clip, full} = query;
  return useMemo(() => {
    const range = zoomOf(zoom);
    const onZoom = (part) => {
      const text = part && part.map((value) => Number(value.toPrecision(9))).join(",");
      patch({zoom: text}, {replace: true});
    };
    const axes = {logX: logx === "1", logY: logy === "1", clip: clip === "1", full: full === "1"};
    const plot = {...axes, zoom: range, onZoom};
    const hidden = new Set(hide.split(",").filter(Boolean).map(Number));
    return {x, smooth: smoothOf(smooth, usual), thin: thin === "1", hidden, zoom: range, plot};
  }, [x, smooth, zoom, hide, thin, logx, logy, clip, full, patch]);
}

// The choices of axis and smoothing, the view's own ones, and what is drawn how; `thin` names the single lines.
export function CurveTools({usual, thin, children}) {
  const {query, patch} = useAddress();
  const smoothings = usual ? [usual, ...SMOOTHINGS] : SMOOTHINGS;
  const chosen = smoothOf(query.smooth, smoothings[0][0]);
  const smooth = (value) => patch({smooth: value === smoothings[0][0] ? null : value});
  const whole = html`<button type="button" onClick=${() => patch({zoom: null})}>whole range</button>`;
  return html`<${AddressChoice} name="x" label="x axis" options=${X_CHOICES} resets=${{zoom: null}} />
    ${!isCopy() && html`<${Choice} label="smoothing" options=${smoothings} value=${chosen} onChoose=${smooth} />`}
    ${children}${thin && html`<${AddressTick} name="thin">${thin}<//>`}
    <${AddressTick} name="logx">log x<//><${AddressTick} name="logy">log y<//>${query.zoom && whole}`;
}

// The chosen metric of places is that of the address, else the first of `first`, else the first that is worth watching.
export function useMetric(at, first = []) {
  const {query} = useAddress();
  const {data} = useAnswer("metrics", {at}, {kinds: ["metrics", "evals"], wait: 4000});
  const keys = data ? data.metrics.map(({key}) => key) : [];
  const watch = data ? data.watch : [];
  const usual = first[0] || watch[0] || keys[0] || null;
  const watched = [...new Set([...first, ...watch].filter(Boolean))];
  const rest = keys.filter((key) => !watched.includes(key));
  return {metric: query.key || usual, usual, watched, rest, isKnown: !!data};
}

export function MetricChoice({of: {usual, watched, rest}}) {
  const options = [...watched, ...rest].map((key) => [key, key]);
  return html`<${AddressChoice} name="key" label="metric" class="metric" options=${options} usual=${usual} />`;
}

// The legend of groups that the address hides by their index; fewer than two need none.
export function GroupLegend({groups, hidden}) {
  const {patch} = useAddress();
  const toggle = ({index}) => {
    const others = [...hidden].filter((each) => each !== index);
    patch({hide: (hidden.has(index) ? others : [...others, index]).join(",") || null});
  };
  const shown = groups.map((each) => ({...each, hidden: hidden.has(each.index)}));
  return groups.length > 1 && html`<${Legend} groups=${shown} onToggle=${toggle} />`;
}
