// @ts-nocheck
// A sample metric over the rollouts of a step, and over all steps: the histogram and how it moved.

import {get, gone, newest} from "../api.js";
import {axis} from "../charts/forest.js";
import {painted, saveMenu, table} from "../charts/save.js";
import {button, choice, el, failed, keepingFocus, later, loading, put, svg} from "../dom.js";
import {number, plural, tickText} from "../format.js";
import {nameOf} from "../names.js";

export function histogram(bins, {label, xTitle, width = 520, height = 230}) {
  const bottom = height - 38, most = Math.max(1, ...bins.map((each) => each.count));
  const x = axis(bins.flatMap((each) => [each.low, each.high]), 34, width - 10, 6), y = (n) => bottom - n / most * (bottom - 12);
  return svg("svg", {class: "chart", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label},
    [0, Math.ceil(most / 2), most].map((n) => [svg("line", {class: "grid", x1: 34, x2: width - 10, y1: y(n), y2: y(n)}), svg("text", {x: 28, y: y(n) + 4, "text-anchor": "end"}, String(n))]),
    bins.map((each) => each.count ? svg("rect", {x: x(each.low) + 0.5, width: Math.max(1, x(each.high) - x(each.low) - 1), y: y(each.count), height: bottom - y(each.count), fill: "var(--c1)", rx: 1},
      svg("title", null, `${plural(each.count, "rollout")} from ${number(each.low)} to ${number(each.high)}`)) : null),
    x.ticks.map((tick) => svg("text", {x: x(tick), y: bottom + 16, "text-anchor": "middle"}, tickText(tick, x.step, ""))),
    svg("text", {x: width / 2, y: height - 4, "text-anchor": "middle"}, xTitle));
}

// Columns of shares: the darker, the more of the step's rollouts. A click goes to the step.
function heat({steps, edges, counts}, {label, chosen, onStep, width = 520, height = 230}) {
  const left = 52, bottom = height - 38, wide = (width - left - 10) / Math.max(1, steps.length), tall = (bottom - 12) / Math.max(1, edges.length - 1);
  const x = axis([steps[0] || 0, steps[steps.length - 1] || 1], left + wide / 2, width - 10 - wide / 2, 6);
  const most = Math.max(0.01, ...counts.map((row) => Math.max(...row) / Math.max(1, row.reduce((a, b) => a + b, 0))));
  const step = (edges.length - 1) / 4, parts = [];
  for (let i = 0; i <= 4; i += 1) parts.push(svg("text", {x: left - 6, y: bottom - i * step * tall + 4, "text-anchor": "end"}, number(edges[Math.round(i * step)])));
  counts.forEach((row, i) => {
    const total = Math.max(1, row.reduce((a, b) => a + b, 0));
    row.forEach((n, j) => { if (n) parts.push(svg("rect", {x: left + i * wide, y: bottom - (j + 1) * tall, width: wide + 0.2, height: tall + 0.2, fill: "var(--c1)", "fill-opacity": Math.sqrt(n / total / most).toFixed(3)})); });
    parts.push(svg("rect", {x: left + i * wide, y: 12, width: wide, height: bottom - 12, fill: "transparent", class: steps[i] === chosen ? "column on" : "column", on: {click: () => onStep(steps[i])}},
      svg("title", null, `step ${steps[i]}`)));
  });
  const every = Math.max(1, Math.ceil(steps.length / 8));
  steps.forEach((each, i) => { if (i % every === 0) parts.push(svg("text", {x: left + (i + 0.5) * wide, y: bottom + 16, "text-anchor": "middle"}, String(each))); });
  return svg("svg", {class: "chart", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label}, parts, svg("text", {x: (left + width) / 2, y: height - 4, "text-anchor": "middle"}, "step"));
}

// query() gives the address's; patch changes it.
export function distribution(place, query, patch) {
  const next = newest(), nextOver = newest();
  let runs = null, at = null, over = null, asked = "", whole = "";
  const body = el("div", {class: "two"}, loading()), tools = el("div", {class: "tools"});
  const root = el("section", {class: "card wide"}, el("div", {class: "head"}, el("h2", null, "Distribution"), button("Close", () => patch({hist: null, run: null, step: null}))), tools, body);
  const slide = later((value) => patch({step: value}, {replace: true}), 60);

  // Steps that the slider reaches: those that the picture over all steps shows, and the one in view.
  function steps() {
    return over && over.steps.length ? over.steps : at ? [at.step] : [];
  }

  function draw() {
    const {hist} = query(), shown = at.step, all = steps();
    root.querySelector("h2").textContent = `Distribution of ${hist}`;
    const range = el("input", {type: "range", min: 0, max: Math.max(0, all.length - 1), "aria-label": "step", on: {input: () => slide(all[range.value])}});
    range.value = Math.max(0, all.findLastIndex((each) => each <= shown));
    const total = at.bins.reduce((sum, each) => sum + each.count, 0);
    const first = histogram(at.bins, {label: `${hist} at step ${shown} over ${plural(total, "rollout")}`, xTitle: hist});
    const bins = () => table([`${hist} from`, "to", "rollouts"], at.bins.map((each) => [each.low, each.high, each.count]));
    keepingFocus(tools, () => put(tools, runs.length > 1 ? choice("run", runs.map((each) => [each.place, nameOf(each.place)]), run(), (value) => patch({run: value, step: null})) : null,
      at.names ? choice("what", at.names.map((each) => [each, each]), hist, (value) => patch({hist: value})) : null,
      el("label", {class: "tick"}, `step ${shown}`, range), el("span", {class: "muted small"}, "h and l step back and forward"),
      saveMenu(() => ({title: `${hist} step ${shown}`, csv: bins, picture: () => painted(first)}))));
    put(body, el("div", null, el("h3", null, `At step ${shown}`, el("small", null, plural(total, "rollout"))), first),
      over ? el("div", null, el("h3", null, "Over steps", el("small", null, "the darker, the larger a share of the step's rollouts; a click goes to the step")),
        heat(over, {label: `${hist} over steps`, chosen: shown, onStep: (step) => patch({step})})) : null);
  }

  function run() {
    return query().run || (runs.length ? runs[0].place : place);
  }

  async function read() {
    const {hist, step} = query(), now = JSON.stringify([hist, step, query().run]);
    if (!hist || now === asked) return;
    asked = now;
    const signal = next();
    try {
      runs = runs || (await get("columns", {at: place, key: "step", x: "step", points: 2}, signal)).runs;
      const found = await get("histogram", {at: run(), metric: hist, step}, signal);
      if (whole !== `${run()} ${hist}`) over = null;
      at = {...found, bins: found.counts.map((count, i) => ({low: found.edges[i], high: found.edges[i + 1], count}))};
      draw();
      readOver();
    } catch (error) {
      if (gone(error)) return;
      asked = "";
      put(body, failed(error, read));
    }
  }

  // The picture over all steps, of a run and what is counted of it; without it, one step alone is shown.
  async function readOver() {
    const wanted = `${run()} ${query().hist}`;
    if (wanted === whole) return;
    whole = wanted;
    try {
      over = await get("histogram", {at: run(), metric: query().hist, over: "steps"}, nextOver());
      draw();
    } catch (error) { if (whole === wanted) whole = ""; }
  }
  read();
  return {root, update: read, stop() { next.stop(); nextOver.stop(); slide.stop(); }, move(by) {
    const all = steps(), i = at ? all.findLastIndex((each) => each <= at.step) : -1;
    if (i >= 0 && all[i + by] !== undefined) patch({step: all[i + by]}, {replace: true});
  }};
}
