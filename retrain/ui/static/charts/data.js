// @ts-nocheck
// What a chart draws: lines of {name, index, kind, x, y, low, high}. `kind` is mean, run or thin; y may hold null.

import {table} from "./save.js";

const MANY_POINTS = 6000;
const PLACES = 4000;

// x to the nearest of so many places in sight: far less than a pixel, and lines of many runs share them.
function placed(lines, zoom) {
  const ends = lines.filter((line) => line.x.length).flatMap((line) => [line.x[0], line.x[line.x.length - 1]]);
  const [low, high] = zoom || [Math.min(...ends), Math.max(...ends)], width = (high - low) / PLACES;
  return width > 0 ? lines.map((line) => ({...line, x: line.x.map((x) => low + width * Math.round((x - low) / width))})) : lines;
}

// One common list of x, and every column on it: undefined where a line has no point, null where its value is none.
// `rough`: null, or {zoom} where x may be moved within a pixel.
export function aligned(lines, rough = null) {
  const first = lines.find((line) => line.x.length);
  if (!first) return {x: [], columns: lines.map(() => [[], null, null])};
  const alike = lines.every((line) => line.x === first.x || (line.x.length === first.x.length && line.x.every((x, i) => x === first.x[i])));
  if (alike) return {x: first.x, columns: lines.map((line) => [line.y, line.low || null, line.high || null])};
  if (rough && lines.reduce((sum, line) => sum + line.x.length, 0) > MANY_POINTS) lines = placed(lines, rough.zoom);
  const every = new Float64Array(lines.reduce((sum, line) => sum + line.x.length, 0));
  let at = 0;
  for (const line of lines) { every.set(line.x, at); at += line.x.length; }
  every.sort();
  const x = [];
  for (const value of every) if (value !== x[x.length - 1]) x.push(value);
  const columns = lines.map((line) => {
    const places = new Uint32Array(line.x.length);
    let place = 0;
    line.x.forEach((value, i) => { while (x[place] < value) place += 1; places[i] = place; });
    return [line.y, line.low, line.high].map((values) => {
      if (!values) return null;
      const column = new Array(x.length).fill(undefined);
      values.forEach((value, i) => { column[places[i]] = value; });
      return column;
    });
  });
  return {x, columns};
}

// Where the middle 98 % of the values lie, with room around: what "without outliers" shows.
export function middle(lines) {
  const values = lines.flatMap((line) => line.y.filter((y) => y !== null && y !== undefined && Number.isFinite(y))).sort((a, b) => a - b);
  if (values.length < 20) return null;
  const low = values[Math.floor(0.01 * (values.length - 1))], high = values[Math.ceil(0.99 * (values.length - 1))];
  const room = 0.06 * (high - low || Math.abs(high) || 1);
  const outside = values.filter((y) => y < low - room || y > high + room).length;
  return {low: low - room, high: high + room, outside};
}

export function extremes(lines) {
  let low = Infinity, high = -Infinity;
  for (const line of lines) {
    for (const values of [line.y, line.low, line.high]) {
      if (values) for (const y of values) if (y !== null && y !== undefined && Number.isFinite(y)) { if (y < low) low = y; if (y > high) high = y; }
    }
  }
  return low <= high ? [low, high] : null;
}

// A range no narrower than a hundred-thousandth of its values' size: what float32 rounds shall look flat.
export function flat(low, high) {
  const least = 1e-5 * Math.max(Math.abs(low), Math.abs(high)), middle = (low + high) / 2;
  return low < high && high - low < least ? [middle - least / 2, middle + least / 2] : [low, high];
}

// A line's value at x or the last one before it; null without one.
export function valueAt(line, x) {
  let low = 0, high = line.x.length - 1, found = -1;
  while (low <= high) {
    const mid = (low + high) >> 1;
    if (line.x[mid] <= x) { found = mid; low = mid + 1; } else high = mid - 1;
  }
  if (found + 1 < line.x.length && (found < 0 || line.x[found + 1] - x < x - line.x[found])) found += 1;
  for (let i = found; i >= 0; i -= 1) if (line.y[i] !== null && line.y[i] !== undefined) return {x: line.x[i], y: line.y[i], i};
  return null;
}

// A line's last value, of those up to the end of the part in sight.
export function last(line, zoom) {
  for (let i = line.y.length - 1; i >= 0; i -= 1) if ((!zoom || line.x[i] <= zoom[1]) && line.y[i] !== null && line.y[i] !== undefined) return {x: line.x[i], y: line.y[i], i};
  return null;
}

// [[x, y]…] and [[x, low, high]…] as columns.
export function columnsOf(points, band) {
  const x = points.map((point) => point[0]), y = points.map((point) => point[1]);
  if (!band || !band.length) return {x, y};
  const ends = new Map(band.map(([at, low, high]) => [at, [low, high]]));
  return {x, y, low: x.map((at) => (ends.get(at) || [null])[0]), high: x.map((at) => (ends.get(at) || [null, null])[1])};
}

export function csv(xTitle, lines) {
  const {x, columns} = aligned(lines);
  const heads = [xTitle], values = [];
  lines.forEach((line, i) => columns[i].forEach((column, which) => {
    if (!column) return;
    heads.push(line.name + ["", " low", " high"][which]);
    values.push(column);
  }));
  return table(heads, x.map((at, i) => [at, ...values.map((column) => column[i])]));
}
