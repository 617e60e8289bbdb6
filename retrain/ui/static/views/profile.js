// @ts-nocheck
// One number of a rollout along its tokens: a line (the extremes of each place where tokens are many), turns, the chosen.

import {el, svg} from "../dom.js";
import {number} from "../format.js";
import {NUMBERS, written} from "./token_numbers.js";

const WIDE = 1000, TALL = 100, MOST = 1000;

function extent(values) {
  let low = Infinity, high = -Infinity, sum = 0;
  for (const value of values) if (value !== null && Number.isFinite(value)) { low = Math.min(low, value); high = Math.max(high, value); sum += 1; }
  return sum ? [low, high] : null;
}

function line(values, x, y) {
  const each = Math.max(1, Math.ceil(values.length / MOST));
  let d = "", pen = false;
  for (let i = 0; i < values.length; i += each) {
    const part = each === 1 ? null : extent(values.slice(i, i + each));
    const value = each === 1 ? values[i] : part && part[0];
    if (value === null || value === undefined) { pen = false; continue; }
    d += `${pen ? "L" : "M"}${x(i)} ${y(value)}`;
    if (part && part[1] !== part[0]) d += `L${x(i)} ${y(part[1])}`;
    else if (!pen) d += "h.01";
    pen = true;
  }
  return d;
}

// {root, mark(i)}: `starts` are the numbers of the turns' first tokens, `pick(i)` is called with the token clicked.
export function profile(name, values, {starts = [], pick, point}) {
  const about = NUMBERS[name], [low, high] = extent(values) || [0, 1];
  const bottom = about.kind === "range" || about.kind === "which" ? low : Math.min(0, low), top = Math.max(about.kind === "flag" ? 1 : 0, high);
  const room = top - bottom || 1, n = values.length;
  const x = (i) => ((i + 0.5) / n * WIDE).toFixed(1), y = (value) => (TALL - 3 - (value - bottom) / room * (TALL - 6)).toFixed(1);
  const cursor = svg("line", {class: "cursor", y1: 0, y2: TALL, x1: -9, x2: -9}), hover = svg("line", {class: "hover", y1: 0, y2: TALL, x1: -9, x2: -9});
  const at = Math.max(0, values.indexOf(high)), sentence = `${about.title} over ${n} tokens, from ${written(name, low)} to ${written(name, high)}, highest at token ${at}`;
  const picture = svg("svg", {viewBox: `0 0 ${WIDE} ${TALL}`, preserveAspectRatio: "none", role: "img", "aria-label": sentence},
    bottom < 0 && top > 0 ? svg("line", {class: "zero", x1: 0, x2: WIDE, y1: y(0), y2: y(0)}) : null,
    starts.slice(1).map((first) => svg("line", {class: "turnline", x1: (first / n * WIDE).toFixed(1), x2: (first / n * WIDE).toFixed(1), y1: 0, y2: TALL})),
    svg("path", {class: "along", d: line(values, x, y)}), hover, cursor);
  const token = (event) => { const box = picture.getBoundingClientRect(); return Math.max(0, Math.min(n - 1, Math.floor((event.clientX - box.left) / box.width * n))); };
  picture.addEventListener("click", (event) => pick(token(event)));
  picture.addEventListener("pointermove", (event) => point(token(event)));
  picture.addEventListener("pointerleave", () => point(null));
  const place = (which, i) => { const where = i === null ? -9 : x(i); which.setAttribute("x1", where); which.setAttribute("x2", where); };
  const root = el("figure", {class: "profile"}, el("figcaption", null, el("b", null, about.title), el("span", {class: "muted"}, ` along the ${n} tokens${starts.length > 1 ? `, ${starts.length} turns` : ""}`)),
    el("div", {class: "frame"}, el("span", {class: "tick top"}, number(top)), el("span", {class: "tick"}, number(bottom)), picture),
    el("div", {class: "ends"}, el("span", null, "0"), el("span", null, String(n - 1))));
  return {root, mark: (i) => place(cursor, i), point: (i) => place(hover, i)};
}
