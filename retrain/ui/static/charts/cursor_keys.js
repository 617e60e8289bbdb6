// @ts-nocheck
// The keys of a chart: its cursor goes from point to point, its range is made narrower and wider around it.

const FEWEST = 3;

function logs(log) {
  return log ? [Math.log10, (value) => 10 ** value] : [(value) => value, (value) => value];
}

// The point `by` further than the cursor; without one, the first or the last.
function next(places, held, by) {
  if (held === null) return by > 0 ? places[0] : places[places.length - 1];
  const behind = places.filter((x) => x < held).length, on = places[behind] === held;
  const at = by > 0 ? behind + by - (on ? 0 : 1) : behind + by;
  return places[Math.max(0, Math.min(places.length - 1, at))];
}

// Half or twice of the range in sight, around the cursor; null where that is all there is, undefined where too few
// points would be left.
function zoomed(plot, factor) {
  const {min, max} = plot.chart.scales.x, [to, from] = logs(plot.options.logX && min > 0);
  const low = to(min), high = to(max), middle = plot.held === null ? (low + high) / 2 : to(plot.held);
  const share = high > low ? (middle - low) / (high - low) : 0.5, width = (high - low) * factor;
  const start = from(middle - share * width), end = from(middle + (1 - share) * width);
  if (factor > 1 && (start <= plot.ends[0] || end >= plot.ends[1])) {
    const kept = [Math.max(start, plot.ends[0]), Math.min(end, plot.ends[1])];
    return kept[0] === plot.ends[0] && kept[1] === plot.ends[1] ? null : kept;
  }
  return factor < 1 && plot.places().filter((x) => x >= start && x <= end).length < FEWEST ? undefined : [start, end];
}

// Whether the key was one of the chart's.
function pressed(card, key, shift) {
  const {plot} = card, {onZoom, zoom} = card.options, step = {ArrowRight: 1, ArrowLeft: -1}[key];
  const factor = {"+": 0.5, "=": 0.5, "-": 2}[key];
  if (step || key === "Home" || key === "End") {
    const places = plot.places();
    if (!places.length) return false;
    plot.hold(step ? next(places, plot.held, shift ? 10 * step : step) : places[key === "Home" ? 0 : places.length - 1]);
    card.say();
    return true;
  }
  if (factor && onZoom) {
    const range = zoomed(plot, factor);
    if (range !== undefined && (range || zoom)) onZoom(range);
    return true;
  }
  if (key !== "Escape" || (!zoom && plot.held === null)) return false;
  if (zoom && onZoom) onZoom(null); else release(card);
  return true;
}

function release(card) {
  if (!card.plot || card.plot.held === null) return;
  card.plot.hold(null);
  card.read(null, null);
}

// Lets keys move the cursor of a card while it, or its chart, has the focus.
export function cursorKeys(card) {
  card.root.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !card.plot || !card.plot.chart) return;
    if ((event.target !== card.root && event.target !== card.area) || !pressed(card, event.key, event.shiftKey)) return;
    event.preventDefault();
    event.stopPropagation();
  });
  card.root.addEventListener("focusout", (event) => { if (!card.root.contains(event.relatedTarget)) release(card); });
}
