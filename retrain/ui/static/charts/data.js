// What a chart draws: lines of one or more conditions, aligned to a common x for the canvas.

import {table} from "./save.js";

/**
 * @typedef {(number | null | undefined)[]} Values
 * @typedef {object} Line
 * @property {string} name
 * @property {number} index of its condition: colour, dash and shape
 * @property {"mean" | "run" | "thin" | "points"} [kind] points: marks that no line joins
 * @property {number[]} x
 * @property {Values} y null where there is no value
 * @property {Values | null} [low] of its band
 * @property {Values | null} [high]
 * @property {Values | null} [raw] what `y` is smoothed from, at the same x
 * @property {string} [group]
 * @property {number} [n] of how many runs it is the mean
 * @property {boolean} [sparse] few points, joined over those without a value
 * @typedef {{x: number, y: number, i: number}} Point
 */

const MANY_POINTS = 6000;
const PLACES = 4000;
const MOST_RAW = 6;

export const isValue = (value) => value !== null && value !== undefined;

// Move x to the nearest of so many places in sight: far less than a pixel, and lines of many runs share them.
function placed(lines, zoom) {
  const ends = lines.filter((line) => line.x.length).flatMap((line) => [line.x[0], line.x[line.x.length - 1]]);
  const [low, high] = zoom || [Math.min(...ends), Math.max(...ends)];
  const width = (high - low) / PLACES;
  if (!(width > 0)) return lines;
  return lines.map((line) => ({...line, x: line.x.map((x) => low + width * Math.round((x - low) / width))}));
}

/**
 * Return one common list of x, and [y, low, high] of every line on it: undefined where a line has no point. With
 * `rough` ({zoom}) x may be moved within a pixel.
 * @returns {{x: number[], columns: (Values | null)[][]}}
 */
export function aligned(lines, /** @type {any} */ rough = null) {
  const points = lines.reduce((sum, line) => sum + line.x.length, 0);
  const moved = rough && points > MANY_POINTS ? placed(lines, rough.zoom) : lines;
  const tables = moved.map(({x, y, low, high}) => [x, y, ...(low ? [low, high] : [])]);
  const [x, ...rest] = tables.length ? globalThis.uPlot.join(tables) : [[]];
  return {x, columns: tables.map((table) => [...rest.splice(0, table.length - 1), null, null].slice(0, 3))};
}

// Return where the middle 98 % of the values lie, with room around: what "without outliers" shows.
export function middle(lines) {
  const values = lines.flatMap((line) => line.y.filter(Number.isFinite)).sort((a, b) => a - b);
  if (values.length < 20) return null;
  const low = values[Math.floor(0.01 * (values.length - 1))];
  const high = values[Math.ceil(0.99 * (values.length - 1))];
  const room = 0.06 * (high - low || Math.abs(high) || 1);
  const outside = values.filter((y) => y < low - room || y > high + room).length;
  return {low: low - room, high: high + room, outside};
}

// Return a range no narrower than a hundred-thousandth of its values' size: what float32 rounds shall look flat.
export function flat(low, high) {
  const least = 1e-5 * Math.max(Math.abs(low), Math.abs(high));
  const centre = (low + high) / 2;
  return low < high && high - low < least ? [centre - least / 2, centre + least / 2] : [low, high];
}

/** @returns {Point | null} the last one with a value up to this index */
function lastUpTo(line, index) {
  const i = line.y.findLastIndex((y, at) => at <= index && isValue(y));
  return i < 0 ? null : {x: line.x[i], y: line.y[i], i};
}

// Return a line's point that is nearest to x, or the last one with a value before it.
export function valueAt(line, x) {
  const before = line.x.findLastIndex((at) => at <= x);
  const next = before + 1;
  const isNext = next < line.x.length && (before < 0 || line.x[next] - x < x - line.x[before]);
  return lastUpTo(line, isNext ? next : before);
}

// Return a line's last point, of those up to the end of the part in sight.
export function last(line, zoom) {
  return lastUpTo(line, zoom ? line.x.findLastIndex((at) => at <= zoom[1]) : line.x.length - 1);
}

// Return [[x, y]…] and [[x, low, high]…] as columns.
export function columnsOf(points, band) {
  const x = points.map((point) => point[0]);
  const y = points.map((point) => point[1]);
  if (!band || !band.length) return {x, y};
  const ends = new Map(band.map(([at, low, high]) => [at, [low, high]]));
  const end = (at, side) => (ends.get(at) || [null, null])[side];
  return {x, y, low: x.map((at) => end(at, 0)), high: x.map((at) => end(at, 1))};
}

// Return the lines with a faint one behind each that is smoothed, of what it is smoothed from; of many lines none.
export function withRaw(lines) {
  const smoothed = lines.filter((line) => line.raw);
  if (smoothed.length > MOST_RAW) return lines;
  return [
    ...smoothed.map(({name, index, x, raw: y}) => ({name: `${name} raw`, index, kind: "thin", x, y})),
    ...lines,
  ];
}

export function csv(xTitle, lines) {
  const {x, columns} = aligned(lines);
  const ends = ["", " low", " high"];
  const named = lines.flatMap(({name}, i) => columns[i].map((values, which) => ({name: name + ends[which], values})));
  const all = named.filter(({values}) => values);
  const rows = x.map((at, i) => [at, ...all.map(({values}) => values && values[i])]);
  return table([xTitle, ...all.map(({name}) => name)], rows);
}
