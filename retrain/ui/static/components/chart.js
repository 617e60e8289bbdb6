// A line chart with its frame: title, what the cursor stands on, files to save, and room for the view's own buttons.

import {csv, isValue, withRaw} from "../charts/data.js";
import {pictureOf} from "../charts/picture.js";
import {Plot} from "../charts/plot.js";
import {SaveMenu} from "../charts/save.js";
import {X_TITLES} from "../charts/ticks.js";
import {Readout, spokenChart, spokenReadings} from "./readout.js";
import {Failed, Loading} from "./states.js";
import {html, useElement, useLayoutEffect, useMemo, useState} from "../lib/html.js";

const NO_CURSOR = {x: /** @type {number | null} */ (null), y: /** @type {number | null} */ (null)};

// The canvas; it draws again where the lines or one of the options are others. `plot` is a ref for its Plot.
function Canvas({lines, options: {onZoom, onStep, onCursor, ...drawn}, label, plot}) {
  const root = useElement();
  useLayoutEffect(() => {
    plot.current = new Plot(root.current, /** @type {any} */ ({...drawn}));
    return () => {
      plot.current.stop();
      plot.current = null;
    };
  }, []);
  useLayoutEffect(() => {
    Object.assign(plot.current.options, {onZoom, onStep, onCursor});
  });
  useLayoutEffect(() => {
    const {current} = plot;
    current.set(lines, drawn);
    if (current.held !== null) queueMicrotask(() => current.hold(current.held));
  }, [lines, ...Object.values(drawn)]);
  const spoken = {role: "application", "aria-roledescription": "chart", tabindex: "0", "aria-label": label};
  return html`<div class="plot" ref=${root} ...${spoken} />`;
}

/**
 * `lines` are null while they are read, and the same array between renderings (`useMemo`); `share` says how values are
 * written (readout.js); `tools` are the view's buttons. Further properties are PlotOptions (charts/plot.js), always the
 * same ones.
 */
export function Chart({title, lines, words = "", hint = null, level = "h3", tools = null, error = null, ...more}) {
  const {retry, emptyWords, share, ...options} = more;
  const plot = useElement();
  const [cursor, setCursor] = useState(NO_CURSOR);
  const [spoken, setSpoken] = useState(false);
  const drawn = useMemo(() => withRaw(lines || []), [lines]);
  const {x, zoom, counts, marks, onZoom} = options;
  const reading = {lines: lines || [], cursor, x, share, zoom, counts, marks};
  const xTitle = X_TITLES[x] || x;
  const saved = () => ({
    ...{title, csv: () => csv(xTitle, drawn)},
    picture: () => pictureOf(plot.current.chart, `${title} over ${xTitle}`, drawn),
  });
  const press = (event) => {
    const modified = event.ctrlKey || event.metaKey || event.altKey;
    if (modified || !plot.current || !plot.current.chart || !event.target.matches(".plot, .chartcard")) return;
    const done = handleKey({plot: plot.current, onZoom, zoom}, event.key, event.shiftKey);
    if (!done) return;
    setSpoken(done === "moved");
    event.preventDefault();
    event.stopPropagation();
  };
  const leave = (event) => {
    if (event.currentTarget.contains(event.relatedTarget) || !plot.current || plot.current.held === null) return;
    plot.current.hold(null);
    setSpoken(false);
  };
  const isFull = drawn.some((line) => line.x.length && line.y.some(isValue));
  let content = html`<p class="state">${emptyWords || "No values yet"}</p>`;
  if (error) content = html`<${Failed} error=${error} retry=${retry} />`;
  else if (!lines) content = html`<${Loading} />`;
  if (isFull) {
    const canvas = {lines: drawn, options: {...options, onCursor: (atX, atY) => setCursor({x: atX, y: atY})}, plot};
    content = html`<${Canvas} ...${canvas} label=${spokenChart(title, reading)} />`;
  } else content = html`<div class="plot">${content}</div>`;
  const {outside = 0} = (isFull && plot.current && plot.current.limits) || {};
  return html`<figure class="card chartcard" tabindex="-1" onKeyDown=${press} onFocusOut=${leave}>
    <div class="head">
      <${level} class="heading" title=${hint}>${title}${words && html`<small>${words}</small>`}<//>
      <div class="no-print buttons">${tools}<${SaveMenu} get=${saved} isSvg=${false} /></div>
    </div>
    ${isFull ? html`<${Readout} ...${reading} outside=${outside} />` : html`<div class="readout" />`}
    ${content}
    <p class="away" role="status">${spoken && isFull ? spokenReadings(reading) : ""}</p>
  </figure>`;
}

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
function handleKey({plot, onZoom, zoom}, key, shift) {
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
