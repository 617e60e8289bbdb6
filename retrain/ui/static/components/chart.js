// A line chart with its frame: title, what the cursor stands on, files to save, and room for the view's own buttons.

import {handleKey} from "../charts/cursor_keys.js";
import {csv, isValue, withRaw} from "../charts/data.js";
import {pictureOf} from "../charts/picture.js";
import {Plot} from "../charts/plot.js";
import {SaveMenu} from "../charts/save.js";
import {X_TITLES} from "../charts/ticks.js";
import {html, useElement, useLayoutEffect, useMemo, useState} from "../lib/html.js";
import {Readout, spokenChart, spokenReadings} from "./readout.js";
import {Failed, Loading} from "./states.js";

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
