// One chart of the Metrics page: the runs of a metric, or its conditions with bands; read only while it is in sight.

import {get} from "../api.js";
import {Card} from "../charts/card.js";
import {smoothed} from "../charts/data.js";
import {button, el, spaced} from "../dom.js";
import {patch} from "../router.js";
import {why} from "../why.js";
import {countsOf, linesOf} from "./campaign_curves.js";

const BANDS_OF = 4;

function matches(filter) {
  if (!filter) return () => true;
  try {
    const test = new RegExp(filter, "i");
    return (text) => test.test(text);
  } catch (error) {
    return (text) => text.toLowerCase().includes(filter.toLowerCase());
  }
}

// Charts are drawn a few in each frame, so that the page answers while many change.
const waiting = new Set();
const SLICE_MS = 14;

function inTurn(card) {
  waiting.add(card);
  if (waiting.size === 1) requestAnimationFrame(drawSome);
}

function drawSome() {
  const start = performance.now();
  for (const card of waiting) {
    waiting.delete(card);
    card.paint();
    if (performance.now() - start > SLICE_MS) break;
  }
  if (waiting.size) requestAnimationFrame(drawSome);
}

// page: {columns, place, settings(), hidden: Set, onZoom}; metric: Metric; own: {only, tools, big}
export class MetricCard {
  constructor(page, metric, own = {}) {
    Object.assign(this, {page, metric, own, drops: [], parts: {}, shown: false});
    const {key, unit, definition, healthy, histogram} = metric;
    const tools = [
      own.tools || button("☆", () => page.pin(key), {class: "bare", title: "add to Mine", "aria-label": `add ${key} to Mine`}),
      histogram ? button("▥", () => patch({hist: histogram, step: null}), {class: "bare", title: "distribution over rollouts", "aria-label": `distribution of ${key}`}) : null,
      own.big ? button("×", () => patch({open: null}), {class: "bare", title: "close", "aria-label": "close the large chart"})
        : button("⤢", () => patch({open: key}), {class: "bare", title: "large", "aria-label": `${key} large`}),
      button("Why?", () => why(key, page.runs()), {class: "bare", "aria-label": `why? ${key}`}),
    ];
    this.card = new Card({title: key, words: [unit && unit !== "share" ? unit : "", healthy && healthy.text ? `healthy: ${healthy.text}` : ""].filter(Boolean).join(" · "),
      tools, level: own.level, height: own.big ? 460 : 172, group: "metrics", share: unit === "share", unit: unit === "share" ? "%" : "", range: metric.range, healthy, onZoom: page.onZoom,
      ...page.settings().plot});
    this.root = this.card.root;
    this.root.dataset.key = key;
    if (definition) this.card.heading.title = definition;
    if (own.filterable) this.root.append(this.filter());
    this.draw = () => inTurn(this);
    this.readCurves = spaced(() => this.curves(), 2500);
  }

  filter() {
    const field = el("input", {type: "text", class: "only", placeholder: "all runs; or a filter …", "aria-label": `runs in this chart of ${this.metric.key}`, value: this.own.only || "",
      on: {change: () => this.own.onFilter(field.value)}});
    return field;
  }

  // In sight: asks for its numbers and follows them.
  enter() {
    if (this.shown) return;
    this.shown = true;
    if (this.page.settings().lines === "conditions") { this.curves(); return; }
    const {key, spread} = this.metric;
    const names = {y: key, ...(spread ? {low: spread.min, high: spread.max, std: spread.std} : {})};
    for (const [part, name] of Object.entries(names)) {
      if (!name) continue;
      this.drops.push(this.page.columns.want(name, (list, error) => {
        if (error && part === "y") this.card.fail(error, () => this.page.columns.ask(name));
        if (!list) return;
        this.parts[part] = list;
        this.draw();
      }));
    }
  }

  leave() {
    if (!this.shown) return;
    this.shown = false;
    this.drops.forEach((drop) => drop());
    this.drops = [];
    this.readCurves.stop();
  }

  // Other settings: lines that stay are drawn again, others are read.
  again() {
    this.parts = this.page.settings().lines === "conditions" ? {} : this.parts;
    if (this.shown) { this.leave(); this.enter(); }
    if (this.parts.y || this.body) this.draw();
  }

  async curves() {
    const {x, smooth} = this.page.settings();
    try {
      this.body = await get("curves", {at: this.page.place, key: this.metric.key, x, smooth}, this.page.columns.abort.signal);
      this.draw();
    } catch (error) {
      if (error.name !== "AbortError") this.card.fail(error, () => this.curves());
    }
  }

  changed() {
    if (this.shown && this.page.settings().lines === "conditions") this.readCurves();
  }

  paint() {
    const settings = this.page.settings(), fits = matches(this.own.only);
    const keep = (label, name) => !this.page.hidden.has(label) && fits(name);
    if (settings.lines === "conditions") {
      if (!this.body) return;
      const conditions = this.body.conditions.filter((each) => keep(each.label, each.label));
      const many = conditions.some((each) => each.runs.length > 1);
      this.card.set(linesOf({...this.body, conditions}, settings.thin || !conditions.some((each) => each.mean.length)), {...settings.plot, counts: many ? countsOf({conditions}) : null});
      return;
    }
    if (!this.parts.y) return;
    const runs = this.parts.y.filter((run) => keep(run.label, run.id));
    // Seed by seed, so that no condition lies wholly over another.
    runs.sort((a, b) => (a.seed || 0) - (b.seed || 0) || a.index - b.index);
    const few = runs.length <= BANDS_OF;
    const lines = runs.map((run) => {
      const sparse = run.own || run.y.filter((y) => y !== null).length < 0.5 * run.y.length;
      const [low, high] = few ? this.band(run) : [null, null];
      return {group: run.label, name: run.seed === null || run.seed === undefined ? run.label : `${run.label}, seed ${run.seed}`, index: run.index, kind: "run", sparse, x: run.x,
        y: run.own ? run.y : smoothed(run.y, settings.smooth), ...(low ? {low, high} : {})};
    });
    if (few) lines.unshift(...runs.map((run, i) => this.deviation(run, lines[i])).filter(Boolean));
    const wrong = runs.find((run) => run.error);
    this.card.set(lines, {...settings.plot, counts: null, emptyWords: wrong ? wrong.error : undefined});
  }

  // One standard deviation around the mean of a sample metric, within the band of its extremes.
  deviation(run, line) {
    const std = (this.parts.std || []).find((each) => each.place === run.place);
    if (!std || std.x.length !== run.x.length || this.page.settings().smooth > 1) return null;
    const within = (value, i) => line.low ? Math.min(line.high[i] ?? value, Math.max(line.low[i] ?? value, value)) : value;
    const end = (sign) => run.y.map((y, i) => y === null || std.y[i] === null ? null : within(y + sign * std.y[i], i));
    return {...line, name: `${line.name} ± std`, kind: "shade", low: end(-1), high: end(1)};
  }

  // Smallest and largest of a sample metric; else what the server joined into each point.
  band(run) {
    const [low, high] = ["low", "high"].map((part) => (this.parts[part] || []).find((each) => each.place === run.place));
    if (low && high && low.x.length === run.x.length) return [low.y, high.y];
    return run.low && this.page.settings().smooth <= 1 ? [run.low, run.high] : [null, null];
  }

  stop() {
    this.leave();
    waiting.delete(this);
    this.card.stop();
  }
}
