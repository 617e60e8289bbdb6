// @ts-nocheck
// A verdict as it is drawn: its class (never a new judgement, only the server's word), and the small interval bar.

import {svg} from "./dom.js";
import {niceStep} from "./format.js";

// "cannot tell", interim and exploratory findings are drawn hatched everywhere.
export function isOpen(word) {
  return /^(cannot tell|interim|exploratory)/.test(word || "");
}

export function classOf(word) {
  const short = (word || "").replace(/^typical runs /, "");
  if (/^better/.test(short)) return "up";
  if (/^worse/.test(short)) return "down";
  if (/^(alike|higher|lower)/.test(short)) return "same";
  return "unclear";
}

let hatches = 0;

// A hatch pattern in a colour, to put into <defs>; its fill is url(#id).
export function hatch(paint) {
  const id = `hatch${hatches += 1}`;
  const pattern = svg("pattern", {id, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)"},
    svg("rect", {width: 6, height: 6, fill: paint, "fill-opacity": 0.1}),
    svg("rect", {width: 2, height: 6, fill: paint, "fill-opacity": 0.6}));
  return {pattern, fill: `url(#${id})`};
}

// How far the axis of several differences reaches, so that their bars can be compared.
export function reach(verdicts) {
  const ends = verdicts.flatMap((each) => [each.low, each.high, each.difference, each.margin])
    .filter((value) => Number.isFinite(value)).map(Math.abs);
  const most = Math.max(...ends, 1e-9);
  return niceStep(most / 2) * Math.ceil(most / niceStep(most / 2) - 1e-9);
}

// The difference with its interval as one bar around zero; `most` is what either end stands for.
export function bar(verdict, most, {width = 190, height = 26} = {}) {
  const x = (value) => width / 2 + Math.max(-1, Math.min(1, value / most)) * (width / 2 - 4);
  const middle = height / 2;
  const paint = {up: "var(--good)", down: "var(--bad)", same: "var(--muted)", unclear: "var(--warn)"}[classOf(verdict.word)];
  const {pattern, fill} = hatch(paint);
  const parts = [svg("defs", null, pattern), svg("line", {class: "grid", x1: 4, x2: width - 4, y1: middle, y2: middle})];
  if (verdict.margin) {
    parts.push(svg("rect", {class: "margin", x: x(-verdict.margin), width: x(verdict.margin) - x(-verdict.margin), y: 2, height: height - 4}));
  }
  parts.push(svg("line", {class: "zero", x1: width / 2, x2: width / 2, y1: 1, y2: height - 1}));
  if (Number.isFinite(verdict.low) && Number.isFinite(verdict.high)) {
    parts.push(svg("rect", {x: x(verdict.low), width: Math.max(1.5, x(verdict.high) - x(verdict.low)), y: middle - 5, height: 10,
      rx: 1.5, fill: isOpen(verdict.word) ? fill : paint, "fill-opacity": isOpen(verdict.word) ? 1 : 0.38}));
  }
  if (Number.isFinite(verdict.difference)) {
    parts.push(svg("line", {x1: x(verdict.difference), x2: x(verdict.difference), y1: middle - 8, y2: middle + 8, stroke: paint, "stroke-width": 2.5}));
  }
  return svg("svg", {class: "bar", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `interval of the difference: ${verdict.sentence || verdict.word}`}, parts);
}
