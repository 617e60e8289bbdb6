// The keys of a chart: its cursor goes from point to point, its range is made narrower and wider around it.

/** @typedef {{plot: any, onZoom?: ((zoom: number[] | null) => void) | null, zoom?: number[] | null}} Target */

const FEWEST = 3;

// Return the point `by` further than the cursor; without one, the first or the last.
function next(places, held, by) {
  if (held === null) return by > 0 ? places[0] : places[places.length - 1];
  const behind = places.filter((x) => x < held).length;
  const on = places[behind] === held;
  const at = by > 0 ? behind + by - (on ? 0 : 1) : behind + by;
  return places[Math.max(0, Math.min(places.length - 1, at))];
}

// Return half or twice of the range in sight, around the cursor; null where that is all there is, undefined where too
// few points would be left.
function zoomed(plot, factor) {
  const {min, max} = plot.chart.scales.x;
  const log = plot.options.logX && min > 0;
  const to = (value) => (log ? Math.log10(value) : value);
  const from = (value) => (log ? 10 ** value : value);
  const [low, high] = [to(min), to(max)];
  const centre = plot.held === null ? (low + high) / 2 : to(plot.held);
  const share = high > low ? (centre - low) / (high - low) : 0.5;
  const width = (high - low) * factor;
  const [start, end] = [from(centre - share * width), from(centre + (1 - share) * width)];
  if (factor > 1 && (start <= plot.ends[0] || end >= plot.ends[1])) {
    const kept = [Math.max(start, plot.ends[0]), Math.min(end, plot.ends[1])];
    return kept[0] === plot.ends[0] && kept[1] === plot.ends[1] ? null : kept;
  }
  const inside = plot.places().filter((x) => x >= start && x <= end);
  return factor < 1 && inside.length < FEWEST ? undefined : [start, end];
}

/** Return whether the key was one of the chart's: "moved" where the cursor went on. @returns {"moved" | boolean} */
export function handleKey({plot, onZoom, zoom}, key, shift) {
  const by = /** @type {Record<string, number>} */ ({ArrowRight: 1, ArrowLeft: -1})[key];
  const factor = /** @type {Record<string, number>} */ ({"+": 0.5, "=": 0.5, "-": 2})[key];
  if (by || key === "Home" || key === "End") {
    const places = plot.places();
    if (!places.length) return false;
    const end = places[key === "Home" ? 0 : places.length - 1];
    plot.hold(by ? next(places, plot.held, shift ? 10 * by : by) : end);
    return "moved";
  }
  if (factor && onZoom) {
    const range = zoomed(plot, factor);
    if (range !== undefined && (range || zoom)) onZoom(range);
    return true;
  }
  if (key !== "Escape" || (!zoom && plot.held === null)) return false;
  if (zoom && onZoom) onZoom(null);
  else plot.hold(null);
  return true;
}
