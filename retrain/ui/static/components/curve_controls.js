// What views with curves let one choose alike: the smoothing, and the part of the x axis in sight.

import {isCopy} from "../copy.js";
import {html} from "../lib/html.js";
import {Choice} from "./inputs.js";

/** @type {[string, string][]} */
export const SMOOTHINGS = [
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
 * @param {{value: string, onChoose: (smooth: string | null) => void, usual?: [string, string] | null}} props
 */
export function SmoothingChoice({value, onChoose, usual = null}) {
  if (isCopy()) return null;
  const known = usual ? [usual, ...SMOOTHINGS] : SMOOTHINGS;
  const options = known.some(([key]) => key === value) ? known : [...known, [value, value]];
  const choose = (smooth) => onChoose(smooth === known[0][0] ? null : smooth);
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
