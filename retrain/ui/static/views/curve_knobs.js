// @ts-nocheck
// What the pages with curves let one choose alike: how far a curve is smoothed, and the part of the x axis in sight.

import {isCopy} from "../copy.js";
import {choice} from "../dom.js";

const MOST_SMOOTH = 100000;
export const SMOOTH = [[1, "no smoothing"], ...[5, 10, 20, 50, 100].map((steps) => [steps, `over ${steps} steps`])];

// The choice of it; a copy without a server holds one answer of each curve.
export function smoothing(choices, value, change) {
  return isCopy() ? "" : choice("smoothing", choices, value, change);
}

// How far the address says that a curve is smoothed; null: as the page does by itself.
export function smoothOf(query) {
  const steps = Number(query.smooth);
  return !isCopy() && Number.isInteger(steps) && steps >= 1 && steps <= MOST_SMOOTH ? steps : null;
}

// The part in sight as the address holds it, "from,to" in units of the x axis; null: all of it.
export function zoomOf(query) {
  const range = (query.zoom || "").split(",").map(Number);
  return query.zoom && range.length === 2 && range.every(Number.isFinite) && range[0] < range[1] ? range : null;
}

// The change of the address for a part; null: all of it again.
export function zoomTo(range) {
  return {zoom: range ? range.map((value) => Number(value.toPrecision(9))).join(",") : null};
}
