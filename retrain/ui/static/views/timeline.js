// @ts-nocheck
// Where the time of a run's steps went: a row of bars for each step, and the lanes of one step.

import {get, gone, newest} from "../api.js";
import {button, choice, el, failed, keepingFocus, loading, nothing, put, spaced, svg} from "../dom.js";
import {duration, niceStep, plural, shortened} from "../format.js";
import {nameOf, runName} from "../names.js";
import {campaignOf} from "../places.js";
import {go, link} from "../router.js";

const WINDOW = 60;

// Names of phases, in the order of a step, with a colour each; others take turns at the rest.
const PHASES = ["rollout", "score", "credit", "update", "cohort", "eval", "checkpoint", "record"];

function paintOf(names) {
  const all = [...PHASES.filter((name) => names.includes(name)), ...names.filter((name) => !PHASES.includes(name))];
  return new Map(all.map((name, i) => [name, name === "other" ? "var(--line)" : `var(--c${i % 8 + 1})`]));
}

function overview(steps, paint, {chosen, width, choose}) {
  const height = 210, left = 56, bottom = height - 26, wide = (width - left - 8) / Math.max(1, steps.length);
  const most = Math.max(...steps.map((each) => Math.max(each.end - each.start, 1e-9))), tickStep = niceStep(most / 4);
  const y = (seconds) => bottom - seconds / (Math.ceil(most / tickStep) * tickStep) * (bottom - 10);
  const parts = [];
  for (let tick = 0; tick <= most + tickStep; tick += tickStep) {
    if (y(tick) >= 5) parts.push(svg("line", {class: "grid", x1: left, x2: width - 8, y1: y(tick), y2: y(tick)}), svg("text", {x: left - 6, y: y(tick) + 4, "text-anchor": "end"}, tick === 0 ? "0" : duration(tick)));
  }
  const gap = wide > 3 ? 1 : 0;
  steps.forEach((each, i) => {
    const x = left + i * wide;
    let at = 0;
    for (const [name, fill] of paint) {
      const seconds = each.seconds[name] || 0;
      if (seconds <= 0) continue;
      parts.push(svg("rect", {x: x + gap / 2, width: Math.max(0.5, wide - gap), y: y(at + seconds), height: Math.max(0.3, y(at) - y(at + seconds)), fill}));
      at += seconds;
    }
    parts.push(svg("rect", {x, width: wide, y: 4, height: bottom - 4, fill: "transparent", class: each.step === chosen ? "column on" : "column", on: {click: () => choose(each.step)}},
      svg("title", null, `step ${each.step}: ${duration(each.end - each.start)}`)));
  });
  const every = Math.max(1, Math.ceil(steps.length / Math.max(2, width / 70)));
  steps.forEach((each, i) => { if (i % every === 0) parts.push(svg("text", {x: left + (i + 0.5) * wide, y: bottom + 17, "text-anchor": "middle"}, String(each.step))); });
  return svg("svg", {class: "chart", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `time of steps ${steps[0].step} to ${steps[steps.length - 1].step}, by phase`}, parts);
}

function lanesOf(each, lanes, paint, width) {
  const used = [...new Set(each.spans.map((span) => span[0]))].sort((a, b) => a - b);
  const left = 116, tall = 24, start = Math.min(each.start, ...each.spans.map((span) => span[1])), end = Math.max(each.end, ...each.spans.map((span) => span[2]));
  const height = tall * used.length + 34, x = (value) => left + (value - start) / Math.max(1e-9, end - start) * (width - left - 22);
  const parts = [], tick = niceStep((end - start) / Math.max(3, width / 130) || 1);
  for (let at = 0; at <= end - start + 1e-9; at += tick) parts.push(svg("line", {class: "grid", x1: x(start + at), x2: x(start + at), y1: 4, y2: height - 28}), svg("text", {x: x(start + at), y: height - 12, "text-anchor": "middle"}, at === 0 ? "0" : duration(at)));
  used.forEach((lane, row) => {
    const name = lanes[lane];
    parts.push(svg("text", {class: "value", x: 0, y: 8 + row * tall + 13}, shortened(name, 16)));
    for (const [, begin, stop] of each.spans.filter((span) => span[0] === lane)) {
      parts.push(svg("rect", {x: x(begin), width: Math.max(1, x(stop) - x(begin)), y: 6 + row * tall, height: tall - 6, rx: 2, fill: paint.get(name) || "var(--c6)"}, svg("title", null, `${name}: ${duration(stop - begin)}`)));
    }
  });
  const words = Object.entries(each.seconds).map(([name, seconds]) => `${name} ${duration(seconds)}`).join(", ");
  return svg("svg", {class: "chart", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `lanes of step ${each.step}: ${words}`}, parts);
}

export function timeline(root, state, frame) {
  const {patch} = frame, next = newest(), nextRuns = newest();
  let query = state.query, body = null, runs = null;
  const tools = el("div", {class: "tools"}), place = el("div", null, loading());
  put(root, el("div", {class: "title"}, el("h1", null, "Timeline"), el("p", {class: "muted"}, nameOf(state.place))), tools, place);
  const watch = new ResizeObserver(() => { if (body) draw(); });
  watch.observe(place);

  function move(by) {
    if (!body || !body.shown.length) return;
    const at = body.shown.indexOf(chosen()) + by;
    if (at >= 0 && at < body.shown.length) patch({step: body.shown[at].step}, {replace: true});
    else if (at < 0 && body.from > 0) patch({...range(body.from - WINDOW), step: body.shown[0].step - 1}, {replace: true});
    else if (at > 0 && body.to < body.steps) patch({...range(body.to), step: body.shown[body.shown.length - 1].step + 1}, {replace: true});
  }

  // Rows of the file: a step each.
  function range(from) {
    return {from: Math.max(0, from), to: Math.max(0, from) + WINDOW};
  }

  function chosen() {
    return body.shown.find((each) => String(each.step) === query.step) || body.shown[body.shown.length - 1];
  }

  function draw() {
    const steps = body.shown, first = steps[0], last = steps[steps.length - 1];
    keepingFocus(tools, () => put(tools, runs && runs.length > 1 ? choice("run", runs.map((run) => [run.place, runName(run)]), state.place, (value) => go(link("timeline", value))) : null,
      steps.length ? [button("◂ earlier", () => patch({...range(body.from - WINDOW), step: null}), {disabled: body.from <= 0}),
        button("later ▸", () => patch({...range(body.to), step: null}), {disabled: body.to >= body.steps}),
        button("newest", () => patch({from: null, to: null, step: null}), {disabled: !query.from}),
        el("span", {class: "muted small"}, `steps ${first.step} to ${last.step}, ${plural(body.steps, "step")} in all; h and l go from step to step`)] : null));
    if (!steps.length) { put(place, nothing("No times here", "This run recorded no spans (timing_spans.jsonl).")); return; }
    const width = Math.max(280, place.clientWidth - 36), paint = paintOf(body.phases), each = chosen();
    const total = new Map(body.phases.map((name) => [name, steps.reduce((sum, one) => sum + (one.seconds[name] || 0), 0)]));
    const whole = steps.reduce((sum, one) => sum + one.end - one.start, 0);
    put(place,
      el("figure", {class: "card"}, el("h2", null, "Steps", el("small", null, "a bar for each step, its phases from the bottom; a click shows a step's lanes")), overview(steps, paint, {chosen: each.step, width, choose: (step) => patch({step})})),
      el("figure", {class: "card below"}, el("h2", null, `Step ${each.step}`, el("small", null, `${duration(each.end - each.start)}; what runs at the same time stands in lanes`)), lanesOf(each, body.lanes, paint, width)),
      el("div", {class: "scroll"}, el("table", {class: "tight"}, el("thead", null, el("tr", null, el("th", {scope: "col"}, "phase"), [`step ${each.step}`, "mean of these steps", "share"].map((words) => el("th", {scope: "col", class: "number"}, words)))),
        el("tbody", null, [...paint].map(([name, fill]) => el("tr", null, el("td", null, el("span", {class: "swatch", style: {"--series": fill}, "aria-hidden": "true"}), name),
          el("td", {class: "number"}, each.seconds[name] ? duration(each.seconds[name]) : "–"), el("td", {class: "number"}, duration(total.get(name) / steps.length)),
          el("td", {class: "number"}, `${(100 * total.get(name) / Math.max(1e-9, whole)).toFixed(1)}%`)))))),
      body.cut ? el("p", {class: "muted small"}, "Not all spans of these steps are drawn: look at fewer of them.") : null);
  }

  async function read() {
    try {
      body = await get("timeline", {at: state.place, from: query.from, to: query.to}, next());
      draw();
    } catch (error) {
      if (gone(error)) return;
      body = null;
      put(place, failed(error, read));
    }
  }

  // Of a campaign, the timeline is that of one of its runs.
  async function start() {
    const signal = nextRuns();
    try {
      const above = await campaignOf(state.place);
      signal.throwIfAborted();
      runs = (await get("campaign", {at: above}, signal)).runs;
      if (above === state.place && runs.length && runs[0].place !== above) { go(link("timeline", (runs.find((run) => run.state === "running") || runs[0]).place), {replace: true}); return; }
    } catch (error) { if (gone(error)) return; }
    read();
  }
  start();
  const again = spaced(() => { if (!query.from) read(); }, 2000);
  return {
    title: "Timeline",
    update(to) { const same = to.query.from === query.from && to.query.to === query.to; query = to.query; if (same && body) draw(); else read(); },
    changed: again,
    stop() { next.stop(); nextRuns.stop(); again.stop(); watch.disconnect(); },
    keys: {h: ["previous step", () => move(-1)], l: ["next step", () => move(1)]},
  };
}
