// Choices of all views with curves, kept in the address: metric, x axis, smoothing, hidden lines, the part in sight.

import {isCopy} from "../copy.js";
import {X_CHOICES} from "../charts/ticks.js";
import {useAddress} from "../lib/address.js";
import {html, useMemo} from "../lib/html.js";
import {Choice, Tick} from "./inputs.js";

/** @type {[string, string][]} */
const SMOOTHINGS = [
  ["none", "no smoothing"],
  ...["0.6", "0.9", "0.97", "0.99"].map(
    (weight) => /** @type {[string, string]} */ ([`ema:${weight}`, `EMA ${weight}`]),
  ),
  ...[5, 10, 20, 50, 100].map(
    (steps) => /** @type {[string, string]} */ ([`mean:${steps}`, `mean of ${steps} steps`]),
  ),
];

/**
 * Return the smoothing of the address, as the API takes it; the default where there is none. `20` is `mean:20`.
 * @param {string | undefined} smooth
 */
export function smoothOf(smooth, usual = "none") {
  if (isCopy() || !smooth) return usual;
  if (/^[01]$/.test(smooth)) return "none";
  return /^\d+$/.test(smooth) ? `mean:${smooth}` : smooth;
}

/**
 * The choice of the smoothing; a copy without a server holds one answer of each curve.
 * @param {{usual?: [string, string] | null}} props `usual`: the default, "none" without it
 */
export function SmoothingChoice({usual = null}) {
  const {query, patch} = useAddress();
  if (isCopy()) return null;
  const value = smoothOf(query.smooth, usual ? usual[0] : "none");
  const known = usual ? [usual, ...SMOOTHINGS] : SMOOTHINGS;
  const options = known.some(([key]) => key === value) ? known : [...known, [value, value]];
  const choose = (smooth) => patch({smooth: smooth === known[0][0] ? null : smooth});
  return html`<${Choice} label="smoothing" options=${options} value=${value} onChoose=${choose} />`;
}

/**
 * Return the part in sight as the address holds it, "from,to" in units of the x axis; null for all of it.
 * @param {string | undefined} text
 */
export function zoomOf(text) {
  const range = (text || "").split(",").map(Number);
  return text && range.length === 2 && range.every(Number.isFinite) && range[0] < range[1] ? range : null;
}

/**
 * Return the change of the address for a part; null for all of the axis.
 * @param {number[] | null} range
 */
export function zoomTo(range) {
  return {zoom: range ? range.map((value) => Number(value.toPrecision(9))).join(",") : null};
}

/** The choice of the x axis; another axis shows all of it. */
export function AxisChoice() {
  const {query, patch} = useAddress();
  const choose = (x) => patch({x: x === "step" ? null : x, zoom: null});
  return html`<${Choice} label="x axis" options=${X_CHOICES} value=${query.x || "step"} onChoose=${choose} />`;
}

/** A tick that the address holds under this name. @param {{name: string, title?: string, children?: any}} props */
export function AddressTick({name, title, children}) {
  const {query, patch} = useAddress();
  const choose = (on) => patch({[name]: on ? 1 : null});
  return html`<${Tick} checked=${query[name] === "1"} title=${title} onChoose=${choose}>${children}<//>`;
}

export function WholeRange() {
  const {query, patch} = useAddress();
  return query.zoom && html`<button type="button" onClick=${() => patch(zoomTo(null))}>whole range</button>`;
}

/** @param {{metric: string | null, watched: string[], rest: string[], onChoose: (key: string) => void}} props */
export function MetricChoice({metric, watched, rest, onChoose}) {
  const chosen = metric && ![...watched, ...rest].includes(metric) ? [metric] : [];
  const option = (key) => html`<option key=${key} value=${key} selected=${key === metric}>${key}</option>`;
  const group = ([label, keys]) => keys.length > 0 && html`<optgroup label=${label}>${keys.map(option)}</optgroup>`;
  const groups = Object.entries({watched, all: rest, chosen});
  const choose = (event) => onChoose(event.target.value);
  return html`<select aria-label="metric" class="metric" value=${metric} onChange=${choose}>
    ${groups.map(group)}
  </select>`;
}

/**
 * Return what the address hides of a chart, and a function that hides or shows one of these.
 * @param {string} separator
 * @returns {{hidden: Set<string>, toggle: (name: string) => void}}
 */
export function useHidden(separator) {
  const {query, patch} = useAddress();
  const hidden = useMemo(() => new Set((query.hide || "").split(separator).filter(Boolean)), [query.hide]);
  const toggle = (name) => {
    const others = [...hidden].filter((each) => each !== name);
    patch({hide: (hidden.has(name) ? others : [...others, name]).join(separator) || null});
  };
  return {hidden, toggle};
}
