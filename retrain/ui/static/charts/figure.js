// A chart of lines as a picture of its own: SVG with plain colours, legend and axes' titles.

import {DASHES, SHAPES, css, dashOf, ink, shapeOf} from "../colours.js";
import {extent} from "../format.js";
import {html, renderElement} from "../lib/html.js";
import {extremes, flat, isValue} from "./data.js";
import {X_TITLES, linearTicks, logTicks, xTexts, yTexts} from "./ticks.js";

/** @typedef {import("./data.js").Line} Line */

const [WIDTH, HEIGHT, LEFT, RIGHT] = [720, 360, 64, 16];
const LETTER = 6.7;

/**
 * @typedef {object} Axis
 * @property {number} low
 * @property {number} high
 * @property {boolean} log
 * @property {number} start place of `low`
 * @property {number} end place of `high`
 */

function place({low, high, log, start, end}, value) {
  const to = (each) => (log ? Math.log10(each) : each);
  return start + ((to(value) - to(low)) / (to(high) - to(low) || 1)) * (end - start);
}

function inSight(x, y, at, value) {
  if (!isValue(value) || !Number.isFinite(value) || at < x.low || at > x.high) return false;
  const number = Number(value);
  const room = y.high - y.low;
  return !(y.log && number <= 0) && number >= y.low - room && number <= y.high + room;
}

function pair(x, y, at, value) {
  return `${place(x, at).toFixed(1)} ${place(y, Number(value)).toFixed(1)}`;
}

function linePath(line, x, y) {
  let [d, pen] = ["", false];
  line.x.forEach((at, i) => {
    const seen = inSight(x, y, at, line.y[i]);
    if (seen) d += (pen ? "L" : "M") + pair(x, y, at, line.y[i]);
    if (seen || !line.sparse || line.y[i] !== null) pen = seen;
  });
  return d;
}

function bandPath(line, x, y) {
  const low = line.low || [];
  const high = line.high || [];
  const there = line.x
    .map((_, i) => i)
    .filter((i) => [low[i], high[i]].every((value) => inSight(x, y, line.x[i], value)));
  if (!there.length) return null;
  const over = there.map((i) => pair(x, y, line.x[i], high[i]));
  const under = there.reverse().map((i) => pair(x, y, line.x[i], low[i]));
  return `M${[...over, ...under].join("L")}Z`;
}

// Return the entries of the legend: lines, or their groups where there are many.
function legendEntries(lines) {
  const named = lines.filter((line) => line.kind !== "thin" && line.kind !== "shade");
  const nameOf = (line) => (named.length > 6 && line.group) || line.name;
  const entries = [...new Map(named.map((line) => [nameOf(line), line.index]))];
  let [along, row] = [LEFT, 0];
  return entries.map(([name, index]) => {
    const wide = 36 + LETTER * name.length;
    if (along + wide > WIDTH - RIGHT && along > LEFT) [along, row] = [LEFT, row + 1];
    along += wide;
    return {name, index, x: along - wide, row};
  });
}

/**
 * @param {Line[]} lines
 * @param {any} options
 * @param {number} top where the area of the lines begins
 * @returns {{x: Axis, y: Axis}}
 */
function axesOf(lines, {logX, logY, zoom, limits, zero}, top) {
  const positive = (values) => extent(values.filter((value) => value > 0));
  const xs = lines.flatMap((line) => line.x);
  let [left, right] = zoom || (logX ? positive(xs) : extent(xs)) || [0, 1];
  if (!(left < right)) [left, right] = [left - 0.5, left + 0.5];
  let [low, high] = limits ? [limits.low, limits.high] : extremes(lines) || [0, 1];
  if (!logY) [low, high] = flat(low, high);
  if (zero) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
  if (logY && low <= 0) low = Math.min(high / 1e3, (positive(lines.flatMap((line) => line.y)) || [Infinity])[0]);
  if (!(low < high)) [low, high] = [low - 0.5, high + 0.5];
  return {
    x: {low: left, high: right, log: Boolean(logX), start: LEFT, end: WIDTH - RIGHT},
    y: {low, high, log: Boolean(logY), start: HEIGHT - 40, end: top},
  };
}

/** @param {{x: Axis, y: Axis, xKind: string, unit?: string}} props */
function Ticks({x, y, xKind, unit}) {
  const up = y.log ? {step: 0, ticks: logTicks(y.low, y.high)} : linearTicks(y.low, y.high, 5);
  const across = x.log ? logTicks(x.low, x.high) : linearTicks(x.low, x.high, 7, xKind).ticks;
  const upTexts = up.step ? yTexts(up.ticks, up.step, unit) : up.ticks.flatMap((tick) => yTexts([tick], tick, unit));
  const acrossTexts = xTexts(xKind, across);
  const muted = css("--muted");
  const rows = up.ticks.map((tick, i) => {
    const at = place(y, tick);
    return html`<line x1=${LEFT} x2=${WIDTH - RIGHT} y1=${at} y2=${at} stroke=${css("--line")} />
      <text fill=${muted} x=${LEFT - 6} y=${at + 4} text-anchor="end">${upTexts[i]}</text>`;
  });
  const columns = across.map(
    (tick, i) =>
      html`<text fill=${muted} x=${place(x, tick)} y=${y.start + 17} text-anchor="middle">${acrossTexts[i]}</text>`,
  );
  return html`${rows}${columns}`;
}

/** @param {{line: Line, x: Axis, y: Axis}} props */
function LinePicture({line, x, y}) {
  const mean = line.kind === "mean";
  const opacity = {shade: 0, points: 0, thin: 0.3, mean: 1, run: 0.8}[line.kind || "run"];
  return html`<path
    d=${linePath(line, x, y)}
    stroke=${ink(line.index)}
    stroke-opacity=${opacity}
    stroke-width=${mean ? 2 : 1.2}
    stroke-dasharray=${(mean && DASHES[dashOf(line.index)].join(" ")) || null}
    stroke-linejoin="round"
  />`;
}

/** @param {{entries: ReturnType<typeof legendEntries>}} props */
function LegendPicture({entries}) {
  return entries.map(({name, index, x, row}) => {
    const y = 44 + 16 * row;
    const stroke = {stroke: ink(index), "stroke-dasharray": DASHES[dashOf(index)].join(" ") || null};
    return html`<line x1=${x} x2=${x + 22} y1=${y - 4} y2=${y - 4} stroke-width="2.5" ...${stroke} />
      <path d=${SHAPES[shapeOf(index)](x + 11, y - 4, 3.4)} fill=${ink(index)} />
      <text fill=${css("--ink")} x=${x + 27} y=${y}>${name}</text>`;
  });
}

/**
 * Return the picture of a chart.
 * @param {{title: string, xKind: string, lines: Line[], unit?: string, logX?: boolean, logY?: boolean,
 *   zoom?: number[] | null, limits?: {low: number, high: number} | null, zero?: boolean}} options
 * @returns {SVGSVGElement}
 */
export function figure({title, xKind, unit, lines, ...options}) {
  const shown = lines.filter((line) => line.x.length);
  const entries = legendEntries(shown);
  const top = 58 + 16 * Math.max(0, ...entries.map((entry) => entry.row));
  const {x, y} = axesOf(shown, options, top);
  const ordered = [...shown].sort((a, b) => Number(a.kind === "mean") - Number(b.kind === "mean"));
  const band = (line) =>
    html`<path d=${bandPath(line, x, y)} fill=${ink(line.index)} fill-opacity="0.16" stroke="none" />`;
  const clip = {x: LEFT, y: top, width: WIDTH - LEFT - RIGHT, height: y.start - top};
  const size = {width: WIDTH, height: HEIGHT, viewBox: `0 0 ${WIDTH} ${HEIGHT}`};
  const font = {"font-family": "system-ui, sans-serif", "font-size": 12};
  return renderElement(html`<svg xmlns="http://www.w3.org/2000/svg" ...${size} ...${font}>
    <defs><clipPath id="area"><rect ...${clip} /></clipPath></defs>
    <rect width=${WIDTH} height=${HEIGHT} fill=${css("--raised")} />
    <text fill=${css("--ink")} font-size="14" font-weight="600" x=${LEFT} y="22">${title}</text>
    <${LegendPicture} entries=${entries} />
    <${Ticks} x=${x} y=${y} xKind=${xKind} unit=${unit} />
    <g clip-path="url(#area)" fill="none">
      ${shown.filter((line) => line.low).map(band)}
      ${ordered.map((line) => html`<${LinePicture} line=${line} x=${x} y=${y} />`)}
    </g>
    <text fill=${css("--muted")} x=${(LEFT + WIDTH - RIGHT) / 2} y=${HEIGHT - 6} text-anchor="middle">
      ${X_TITLES[xKind] || xKind}
    </text>
  </svg>`);
}
