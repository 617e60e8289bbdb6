// @ts-nocheck
// Dots with intervals, a row for each condition: the result of every seed, and paired differences with the margin.

import {colour} from "../colours.js";
import {el, svg} from "../dom.js";
import {niceStep, shortened, tickText} from "../format.js";
import {hatch} from "../verdicts.js";
import {painted, saveMenu} from "./save.js";

const LETTER = 6.9, PITCH = 58, TOP = 6;

const SHAPES = [
  (x, y, r) => svg("circle", {cx: x, cy: y, r}),
  (x, y, r) => svg("rect", {x: x - 0.9 * r, y: y - 0.9 * r, width: 1.8 * r, height: 1.8 * r}),
  (x, y, r) => svg("path", {d: `M${x} ${y - 1.2 * r}L${x + 1.15 * r} ${y + 0.85 * r}H${x - 1.15 * r}Z`}),
  (x, y, r) => svg("path", {d: `M${x} ${y - 1.3 * r}l${1.3 * r} ${1.3 * r}l${-1.3 * r} ${1.3 * r}l${-1.3 * r} ${-1.3 * r}Z`}),
];

export function mark(index, x, y, r, hint) {
  const shape = SHAPES[index % SHAPES.length](x, y, r);
  shape.setAttribute("class", "dot");
  shape.setAttribute("fill", colour(index));
  if (hint) shape.append(svg("title", null, hint));
  return shape;
}

// A linear axis whose ends are ticks, from all the numbers that it must hold.
export function axis(values, start, end, wanted, stepOf = niceStep) {
  let low = Math.min(...values), high = Math.max(...values);
  if (!Number.isFinite(low)) [low, high] = [0, 1];
  if (high - low < 1e-12 * Math.max(1, Math.abs(high))) { low -= Math.abs(high) * 0.1 || 0.5; high += Math.abs(high) * 0.1 || 0.5; }
  const step = stepOf((high - low) / wanted);
  const first = Math.floor(low / step + 1e-9), last = Math.ceil(high / step - 1e-9);
  const at = (value) => start + (value - first * step) / ((last - first) * step) * (end - start);
  return Object.assign(at, {step, ticks: Array.from({length: last - first + 1}, (_, i) => (first + i) * step)});
}

// An element whose picture, paint(width), follows its width.
function following(paint) {
  const root = el("div", {class: "forest"});
  const watch = new ResizeObserver(() => { if (root.clientWidth) root.replaceChildren(paint(root.clientWidth)); });
  watch.observe(root);
  return root;
}

// A card with a picture that can be saved: its heading, what else stands in it, and csv() for its numbers.
export function figureCard(heading, title, chart, csv, ...more) {
  return el("figure", {class: "card"}, el("div", {class: "head"}, heading, el("div", {class: "no-print buttons"},
    saveMenu(() => ({title, csv, picture: () => painted(chart.querySelector("svg"))})))), chart, more);
}

// rows: {name, index, values: [{value, hint}], centre, interval, wider, note, open}.
export function forest(rows, options) {
  return following((width) => picture(rows, options, width));
}

function picture(rows, {label, xTitle, unit, zero, margin}, width) {
  const bottom = TOP + PITCH * rows.length, height = bottom + 42;
  const numbers = rows.flatMap((row) => [...row.values.map((each) => each.value), ...(row.interval || []), ...(row.wider || []), row.centre]);
  const x = axis([...numbers, zero ? 0 : null, ...(margin ? [margin, -margin] : [])].filter((value) => value !== null && Number.isFinite(value)),
    12, width - 12, Math.max(3, Math.min(7, width / 75)));
  const parts = [], defs = svg("defs");
  if (margin) {
    parts.push(svg("rect", {class: "margin", x: x(-margin), y: TOP, width: x(margin) - x(-margin), height: bottom - TOP},
      svg("title", null, `differences that do not matter: ±${tickText(margin, 1e-3, unit)}`)));
  }
  for (const tick of x.ticks) {
    parts.push(svg("line", {class: "grid", x1: x(tick), x2: x(tick), y1: TOP, y2: bottom}),
      svg("text", {x: x(tick), y: bottom + 16, "text-anchor": "middle"}, tickText(tick, x.step, unit)));
  }
  if (zero) parts.push(svg("line", {class: "zero", x1: x(0), x2: x(0), y1: TOP, y2: bottom}));
  rows.forEach((row, place) => {
    const top = TOP + PITCH * place, middle = top + 37, paint = colour(row.index);
    const name = shortened(row.name, Math.max(8, Math.floor((width - 24 - LETTER * (row.note || "").length) / (1.1 * LETTER))));
    parts.push(svg("text", {class: "name", x: 12, y: top + 16}, name));
    if (row.note) parts.push(svg("text", {x: width - 12, y: top + 16, "text-anchor": "end"}, row.note));
    if (row.wider) parts.push(svg("line", {x1: x(row.wider[0]), x2: x(row.wider[1]), y1: middle, y2: middle, stroke: paint, "stroke-width": 1.5, opacity: 0.7}));
    if (row.interval) {
      const [low, high] = row.interval.map(x);
      const {pattern, fill} = hatch(paint);
      if (row.open) defs.append(pattern);
      parts.push(svg("rect", {x: low, y: middle - 6, width: Math.max(1.5, high - low), height: 12, rx: 1.5, fill: row.open ? fill : paint, "fill-opacity": row.open ? 1 : 0.3},
        svg("title", null, `95 % interval from ${tickText(row.interval[0], 1e-3, unit)} to ${tickText(row.interval[1], 1e-3, unit)}${row.open ? "; nothing may be concluded yet" : ""}`)));
    }
    row.values.forEach((each, i) => parts.push(mark(row.index, x(each.value), middle + (row.values.length > 1 ? (i % 3 - 1) * 4 : 0), 3.4, each.hint)));
    if (row.centre !== null && row.centre !== undefined) {
      parts.push(svg("line", {x1: x(row.centre), x2: x(row.centre), y1: middle - 11, y2: middle + 11, stroke: paint, "stroke-width": 3}));
    }
  });
  parts.push(svg("text", {x: width / 2, y: height - 6, "text-anchor": "middle"}, xTitle));
  return svg("svg", {class: "chart", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label}, defs, parts);
}

// Cost against gain: a point for each condition, its interval upright, the baseline where it costs nothing and gains nothing.
export function gain(points, options) {
  return following((width) => gainPicture(points, options, width));
}

// Steps at which durations are round.
function timeStep(least) {
  return [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400].find((each) => each >= least) || niceStep(least);
}

function gainPicture(points, {label, xTitle, xText, yTitle, unit}, width) {
  const height = 250, left = 58, bottom = height - 40;
  const x = axis([0, ...points.map((each) => each.x)], left, width - 34, Math.max(3, width / 110), timeStep);
  const y = axis([0, ...points.flatMap((each) => [each.y, ...(each.interval || [])])], bottom, 26, 5);
  const parts = [svg("text", {x: 4, y: 14}, yTitle)];
  for (const tick of y.ticks) {
    parts.push(svg("line", {class: Math.abs(tick) < 1e-12 ? "zero" : "grid", x1: left, x2: width - 16, y1: y(tick), y2: y(tick)}),
      svg("text", {x: left - 6, y: y(tick) + 4, "text-anchor": "end"}, tickText(tick, y.step, unit)));
  }
  for (const tick of x.ticks) parts.push(svg("text", {x: x(tick), y: bottom + 17, "text-anchor": "middle"}, xText(tick)));
  for (const each of points) {
    const across = x(each.x);
    if (each.interval) parts.push(svg("line", {x1: across, x2: across, y1: y(each.interval[0]), y2: y(each.interval[1]), stroke: colour(each.index), "stroke-width": 6, opacity: 0.3}));
    parts.push(mark(each.index, across, y(each.y), 5, each.hint));
    const text = shortened(each.name, 30), right = across + 9 + text.length * LETTER > width;
    parts.push(svg("text", {class: "value", x: right ? across - 9 : across + 9, y: y(each.y) + (each.index === 0 ? 17 : -7), "text-anchor": right ? "end" : "start"}, text));
  }
  parts.push(svg("text", {x: (left + width) / 2, y: height - 6, "text-anchor": "middle"}, xTitle));
  return svg("svg", {class: "chart", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label}, parts);
}
