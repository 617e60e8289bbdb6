// What a chart paints on its canvas behind and below the lines.

import {SHAPES, css, faded, ink, shapeOf} from "../colours.js";

/**
 * @typedef {{low?: number | null, high?: number | null}} Healthy
 * @typedef {{x: number, kind: "resume" | "checkpoint" | "evaluation"}} EventMark
 * @typedef {{index: number, x: number[], n: number[]}} Counts how many seeds there are from each x on
 */

export const STRIP = 4;
const MARK_COLOURS = {resume: "--bad", checkpoint: "--muted", evaluation: "--accent"};

const MOST_SHAPES = 12;

// Return a painter of uPlot's for the points of a line: marks in the shape of its condition, at every point with a
// value where there are few (`all`), else at a dozen of them.
export function shapes(index, radius, all) {
  const shape = SHAPES[shapeOf(index)];
  return (u, series, first, last) => {
    const {top, height, left, width} = u.bbox;
    const r = radius * (devicePixelRatio || 1);
    const [xs, ys] = [u.data[0], u.data[series]];
    const places = [];
    for (let i = first; i <= last; i += 1) if (typeof ys[i] === "number") places.push(i);
    const every = all ? 1 : Math.ceil(places.length / MOST_SHAPES);
    const fill = new Path2D();
    places.forEach((i, at) => {
      if (at % every) return;
      fill.addPath(new Path2D(shape(u.valToPos(xs[i], "x", true), u.valToPos(ys[i], "y", true), r)));
    });
    const clip = new Path2D();
    clip.rect(left - r, top - r, width + 2 * r, height + 2 * r);
    return {stroke: null, fill, clip, flags: 3};
  };
}

function horizontal(u, y, stroke, dash) {
  const {ctx, bbox} = u;
  const place = Math.round(y) + 0.5;
  ctx.setLineDash(dash);
  ctx.strokeStyle = stroke;
  ctx.beginPath();
  ctx.moveTo(bbox.left, place);
  ctx.lineTo(bbox.left + bbox.width, place);
  ctx.stroke();
}

export function paintBehind(u, /** @type {any} */ {healthy, zero, logY}) {
  const {ctx, bbox} = u;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  const known = (value) => Number.isFinite(value) && !(logY && Number(value) <= 0);
  const {low, high} = healthy || {};
  if ((Number.isFinite(low) || Number.isFinite(high)) && u.scales.y.min !== null) {
    const top = known(high) ? u.valToPos(high, "y", true) : bbox.top;
    const bottom = known(low) ? u.valToPos(low, "y", true) : bbox.top + bbox.height;
    ctx.fillStyle = faded(css("--good"), 0.09);
    ctx.fillRect(bbox.left, top, bbox.width, bottom - top);
    const stroke = faded(css("--good"), 0.55);
    for (const end of [low, high]) if (known(end)) horizontal(u, u.valToPos(end, "y", true), stroke, [3, 4]);
  }
  if (zero && !logY) horizontal(u, u.valToPos(0, "y", true), css("--muted"), []);
  ctx.restore();
}

// Paint a row for every condition, the stronger the more seeds there are at that x.
export function paintCounts(u, counts) {
  if (!counts) return;
  const scale = devicePixelRatio || 1;
  const {ctx, bbox} = u;
  const most = counts.reduce((max, each) => each.n.reduce((a, b) => Math.max(a, b), max), 1);
  const right = bbox.left + bbox.width;
  ctx.save();
  counts.forEach(({index, x, n}, row) => {
    const y = bbox.top + bbox.height + (2 + row * STRIP) * scale;
    let i = 0;
    while (i < x.length) {
      let j = i;
      while (j + 1 < x.length && n[j + 1] === n[i]) j += 1;
      const from = Math.max(bbox.left, u.valToPos(x[i], "x", true));
      const to = Math.min(right, u.valToPos(x[Math.min(j + 1, x.length - 1)], "x", true));
      ctx.fillStyle = ink(index, 0.12 + (0.88 * n[i]) / most);
      if (to > from) ctx.fillRect(from, y, to - from, (STRIP - 1) * scale);
      i = j + 1;
    }
  });
  ctx.restore();
}

// Paint where the run was resumed, wrote a checkpoint or was evaluated: a triangle at the top, a dashed line down for a
// resume.
export function paintMarks(u, marks) {
  if (!marks) return;
  const {ctx, bbox} = u;
  const size = 4 * (devicePixelRatio || 1);
  ctx.save();
  for (const {x, kind} of marks) {
    const at = u.valToPos(x, "x", true);
    if (!(at >= bbox.left && at <= bbox.left + bbox.width)) continue;
    ctx.fillStyle = ctx.strokeStyle = css(MARK_COLOURS[kind]);
    ctx.beginPath();
    ctx.moveTo(at - size, bbox.top);
    ctx.lineTo(at + size, bbox.top);
    ctx.lineTo(at, bbox.top + 1.6 * size);
    if (kind === "evaluation") {
      ctx.closePath();
      ctx.stroke();
    } else ctx.fill();
    if (kind !== "resume") continue;
    ctx.setLineDash([4, 4]);
    ctx.beginPath();
    ctx.moveTo(at, bbox.top);
    ctx.lineTo(at, bbox.top + bbox.height);
    ctx.stroke();
    ctx.setLineDash([]);
  }
  ctx.restore();
}
