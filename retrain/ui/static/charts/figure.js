// @ts-nocheck
// A chart of lines as a figure of its own: SVG with plain colours, legend and axes' titles.

import {DASHES, css, dashOf, ink} from "../colours.js";
import {svg} from "../dom.js";
import {niceStep, tickText} from "../format.js";
import {extremes, flat} from "./data.js";
import {X_TITLES, xText} from "./plot.js";

const WIDTH = 720, HEIGHT = 360, LEFT = 64, RIGHT = 16;

function ticks(low, high, wanted) {
  const step = niceStep((high - low) / wanted || 1);
  const out = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i += 1) out.push(i * step);
  return {step, out};
}

function scale(low, high, start, end, log) {
  const f = log ? (value) => Math.log10(value) : (value) => value;
  return (value) => start + (f(value) - f(low)) / (f(high) - f(low) || 1) * (end - start);
}

function path(xs, ys, x, y, ok) {
  let d = "", pen = false;
  xs.forEach((at, i) => {
    if (!ok(at, ys[i])) { pen = false; return; }
    d += `${pen ? "L" : "M"}${x(at).toFixed(1)} ${y(ys[i]).toFixed(1)}`;
    pen = true;
  });
  return d;
}

// The figure of {title, xKind, unit, lines, logX, logY, zoom, limits}.
export function figure({title, xKind, unit, lines, logX, logY, zoom, limits, zero}) {
  const shown = lines.filter((line) => line.x.length);
  const rows = [], text = {fill: css("--ink"), "font-size": 12};
  let named = shown.filter((line) => line.kind !== "thin" && line.kind !== "shade");
  if (named.length > 6) named = [...new Map(named.map((line) => [line.group || line.name, {...line, name: line.group || line.name}])).values()];
  let along = LEFT, row = 0;
  const legend = named.map((line) => {
    const wide = 30 + 6.7 * line.name.length;
    if (along + wide > WIDTH - RIGHT && along > LEFT) { along = LEFT; row += 1; }
    const at = {x: along, y: 44 + 16 * row, line};
    along += wide;
    return at;
  });
  const top = 58 + 16 * row, bottom = HEIGHT - 40;
  const positive = (value, log) => Number.isFinite(value) && (!log || value > 0);
  const xs = shown.flatMap((line) => line.x).filter((value) => positive(value, logX));
  let [left, right] = zoom || [xs.reduce((a, b) => Math.min(a, b), Infinity), xs.reduce((a, b) => Math.max(a, b), -Infinity)];
  if (!(left < right)) [left, right] = [Number.isFinite(left) ? left - 0.5 : 0, Number.isFinite(left) ? left + 0.5 : 1];
  let [low, high] = limits ? [limits.low, limits.high] : extremes(shown) || [0, 1];
  if (!logY) [low, high] = flat(low, high);
  if (zero) { low = Math.min(low, 0); high = Math.max(high, 0); }
  if (logY && low <= 0) low = Math.min(...shown.flatMap((line) => line.y.filter((y) => y > 0)), high / 1e3);
  if (!(low < high)) [low, high] = [low - 0.5, high + 0.5];
  const x = scale(left, right, LEFT, WIDTH - RIGHT, logX), y = scale(low, high, bottom, top, logY);
  const ok = (at, value) => at >= left && at <= right && positive(value, logY) && value >= low - (high - low) && value <= high + (high - low);
  const powers = (from, to) => { const out = []; for (let p = Math.ceil(Math.log10(from)); p <= Math.log10(to); p += 1) out.push(10 ** p); return {step: 1e-9, out}; };
  const across = logX ? powers(left, right) : ticks(left, right, 7), up = logY ? powers(low, high) : ticks(low, high, 5);
  for (const tick of up.out) {
    rows.push(svg("line", {x1: LEFT, x2: WIDTH - RIGHT, y1: y(tick), y2: y(tick), stroke: css("--line")}),
      svg("text", {...text, fill: css("--muted"), x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end"}, tickText(tick, up.step === 1e-9 ? tick : up.step, unit)));
  }
  for (const tick of across.out) rows.push(svg("text", {...text, fill: css("--muted"), x: x(tick), y: bottom + 17, "text-anchor": "middle"}, xText(xKind, tick)));
  const clip = svg("clipPath", {id: "area"}, svg("rect", {x: LEFT, y: top, width: WIDTH - LEFT - RIGHT, height: bottom - top}));
  const inside = svg("g", {"clip-path": "url(#area)", fill: "none"});
  for (const line of shown.filter((each) => each.low)) {
    const there = line.x.map((at, i) => i).filter((i) => ok(line.x[i], line.low[i]) && ok(line.x[i], line.high[i]));
    const d = there.map((i) => `${x(line.x[i]).toFixed(1)} ${y(line.high[i]).toFixed(1)}`).concat(there.reverse().map((i) => `${x(line.x[i]).toFixed(1)} ${y(line.low[i]).toFixed(1)}`));
    if (d.length) inside.append(svg("path", {d: `M${d.join("L")}Z`, fill: ink(line.index), "fill-opacity": 0.16, stroke: "none"}));
  }
  for (const line of [...shown].sort((a, b) => (a.kind === "mean") - (b.kind === "mean"))) {
    const kept = line.sparse ? line.x.map((at, i) => i).filter((i) => line.y[i] !== null) : null;
    inside.append(svg("path", {d: path(kept ? kept.map((i) => line.x[i]) : line.x, kept ? kept.map((i) => line.y[i]) : line.y, x, y, ok), stroke: ink(line.index),
      "stroke-opacity": line.kind === "shade" ? 0 : line.kind === "thin" ? 0.3 : line.kind === "mean" ? 1 : 0.8, "stroke-width": line.kind === "mean" ? 2 : 1.2,
      "stroke-dasharray": line.kind === "mean" ? DASHES[dashOf(line.index || 0)].join(" ") || null : null, "stroke-linejoin": "round"}));
  }
  return svg("svg", {xmlns: "http://www.w3.org/2000/svg", width: WIDTH, height: HEIGHT, viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "font-family": "system-ui, sans-serif"},
    svg("defs", null, clip), svg("rect", {width: WIDTH, height: HEIGHT, fill: css("--raised")}),
    svg("text", {...text, "font-size": 14, "font-weight": 600, x: LEFT, y: 22}, title),
    legend.map(({x: at, y: down, line}) => [svg("line", {x1: at, x2: at + 16, y1: down - 4, y2: down - 4, stroke: ink(line.index), "stroke-width": 3}),
      svg("text", {...text, x: at + 21, y: down}, line.name)]),
    rows, inside, svg("text", {...text, fill: css("--muted"), x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 6, "text-anchor": "middle"}, X_TITLES[xKind] || xKind));
}
