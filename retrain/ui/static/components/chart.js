// A line chart with its frame: title, what the cursor stands on, files to save, and room for the view's own buttons.

import {pressed} from "../charts/cursor_keys.js";
import {csv, isValue, withRaw} from "../charts/data.js";
import {figure} from "../charts/figure.js";
import {Plot} from "../charts/plot.js";
import {SaveMenu} from "../charts/save.js";
import {X_TITLES} from "../charts/ticks.js";
import {html, useLayoutEffect, useMemo, useRef, useState} from "../lib/html.js";
import {Readout, spokenChart, spokenReadings} from "./readout.js";
import {Failed, Loading} from "./states.js";

/**
 * @typedef {import("../charts/data.js").Line} Line
 * @typedef {import("../charts/plot.js").PlotOptions} PlotOptions
 * @typedef {object} ChartOptions
 * @property {string} title
 * @property {Line[] | null} lines null while they are read; keep the array between renderings (`useMemo`)
 * @property {any} [words] below the title
 * @property {string} [hint] of the title
 * @property {"h2" | "h3"} [level] of the title
 * @property {any} [tools] the view's buttons
 * @property {any} [error]
 * @property {() => void} [retry]
 * @property {string} [emptyWords]
 * @property {import("./readout.js").Share} [share]
 * @property {string} [id] of the figure, for links and keys
 * @property {any} [children] below the plot
 */

/** @type {(keyof PlotOptions)[]} */
const DRAWN = ["x", "unit", "height", "group", "logX", "logY", "clip", "full", "range", "healthy", "zero", "zoom"];
DRAWN.push("counts", "marks");

// The canvas; it draws again where the lines or one of the options are others.
function Canvas({lines, options, label, plot}) {
  const root = useRef(null);
  useLayoutEffect(() => {
    const made = new Plot(/** @type {any} */ (root.current), {...options});
    plot.current = made;
    return () => {
      made.stop();
      plot.current = null;
    };
  }, []);
  useLayoutEffect(() => {
    const {onZoom, onStep, onCursor} = options;
    if (plot.current) Object.assign(plot.current.options, {onZoom, onStep, onCursor});
  });
  useLayoutEffect(() => {
    const {current} = plot;
    if (!current) return;
    current.set(lines, Object.fromEntries(DRAWN.map((name) => [name, options[name]])));
    if (current.held !== null) queueMicrotask(() => current.hold(current.held));
  }, [lines, ...DRAWN.map((name) => options[name])]);
  return html`<div
    class="plot"
    ref=${root}
    role="application"
    aria-roledescription="chart"
    tabindex="0"
    aria-label=${label}
  />`;
}

function hasValues(lines) {
  return Boolean(lines && lines.some((line) => line.x.length && line.y.some(isValue)));
}

export function Chart({title, lines, words, hint, level = "h3", tools, error, retry, ...more}) {
  const {emptyWords, share, id, children, ...options} = more;
  const plot = useRef(/** @type {Plot | null} */ (null));
  const [cursor, setCursor] = useState({
    x: /** @type {number | null} */ (null),
    y: /** @type {number | null} */ (null),
  });
  const [spoken, setSpoken] = useState(false);
  const drawn = useMemo(() => withRaw(lines || []), [lines]);
  const {x, zoom, counts, marks, onZoom} = options;
  const reading = {lines: lines || [], cursor, x, share, zoom, counts, marks};
  const get = () => {
    const {unit, logX, logY, zero} = options;
    const limits = plot.current && plot.current.limits;
    const picture = () => figure({title, xKind: x, unit, lines: drawn, logX, logY, zoom, zero, limits});
    return {title, csv: () => csv(X_TITLES[x] || x, drawn), picture};
  };
  const press = (event) => {
    const target = /** @type {Element} */ (event.target);
    const modified = event.ctrlKey || event.metaKey || event.altKey;
    if (modified || !plot.current || !plot.current.chart || !target.matches(".plot, .chartcard")) return;
    const done = pressed({plot: plot.current, onZoom, zoom}, event.key, event.shiftKey);
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
  const move = (atX, atY) => setCursor({x: atX, y: atY});
  const full = hasValues(lines);
  let content = html`<div class="plot"><p class="state">${emptyWords || "No values yet"}</p></div>`;
  if (error && !full) content = html`<div class="plot"><${Failed} error=${error} retry=${retry} /></div>`;
  else if (!lines) content = html`<div class="plot"><${Loading} /></div>`;
  else if (full) {
    const label = spokenChart(title, reading);
    content = html`<${Canvas} lines=${drawn} options=${{...options, onCursor: move}} label=${label} plot=${plot} />`;
  }
  const outside = full && plot.current && plot.current.limits ? plot.current.limits.outside : 0;
  return html`<figure class="card chartcard" id=${id} tabindex="-1" onKeyDown=${press} onFocusOut=${leave}>
    <div class="head">
      <${level} class="heading" title=${hint}>${title}${words && html`<small>${words}</small>`}<//>
      <div class="no-print buttons">${tools}<${SaveMenu} get=${get} /></div>
    </div>
    ${full ? html`<${Readout} ...${reading} outside=${outside} />` : html`<div class="readout" />`}
    ${content}
    ${children}
    <p class="away" role="status">${spoken && full ? spokenReadings(reading) : ""}</p>
  </figure>`;
}
