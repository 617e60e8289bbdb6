// @ts-nocheck
// One chart of the Metrics page: the runs of a metric, or its conditions with bands; read only while it is in sight.

import {Card} from "../charts/card.js";
import {columnsOf} from "../charts/data.js";
import {button, el, spaced} from "../dom.js";
import {nameOf} from "../names.js";
import {why} from "../why.js";
import {countsOf, linesOf} from "./campaign_curves.js";
import {CurveAnswers} from "./curve_answers.js";

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

// The lines of all runs in an answer of /api/curves, as columns of these runs.
function seriesOf(body) {
  return body.conditions.flatMap(({label, index, runs}) => runs.map(({place, seed, points}) =>
    ({place, id: nameOf(place), label, index, seed, own: /^eval\//.test(body.key), low: null, high: null, ...columnsOf(points)})));
}

// One standard deviation around the mean of a sample metric, within the band of its extremes.
function deviation(run, line, parts, smooth) {
  const std = (parts.std || []).find((each) => each.place === run.place);
  if (!std || std.x.length !== run.x.length || smooth > 1) return null;
  const within = (value, i) => line.low ? Math.min(line.high[i] ?? value, Math.max(line.low[i] ?? value, value)) : value;
  const end = (sign) => run.y.map((y, i) => y === null || std.y[i] === null ? null : within(y + sign * std.y[i], i));
  return {...line, name: `${line.name} ± std`, kind: "shade", low: end(-1), high: end(1)};
}

// Smallest and largest of a sample metric; else of the rows since the point before, which the server left out.
function band(run, parts, smooth) {
  const [low, high] = ["low", "high"].map((part) => (parts[part] || []).find((each) => each.place === run.place));
  if (low && high && low.x.length === run.x.length) return [low.y, high.y];
  return run.low && smooth <= 1 ? [run.low, run.high] : [null, null];
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

// page: {columns, place, settings(), hidden: Set, patch, onZoom}; metric: Metric; own: {only, tools, big}
export class MetricCard {
  constructor(page, metric, own = {}) {
    Object.assign(this, {page, metric, own, drops: [], parts: {}, answers: {}, shown: false});
    const {key, unit, definition, healthy, histogram} = metric;
    const tools = [
      own.tools || button("☆", () => page.pin(key), {class: "bare", title: "add to Mine", "aria-label": `add ${key} to Mine`}),
      histogram ? button("▥", () => page.patch({hist: histogram, step: null}), {class: "bare", title: "distribution over rollouts", "aria-label": `distribution of ${key}`}) : null,
      own.big ? button("×", () => page.patch({open: null}), {class: "bare", title: "close", "aria-label": "close the large chart"})
        : button("⤢", () => page.patch({open: key}), {class: "bare", title: "large", "aria-label": `${key} large`}),
      button("Why?", () => why(key, page.runs()), {class: "bare", "aria-label": `why? ${key}`}),
    ];
    this.words = [unit && unit !== "share" ? unit : "", healthy && healthy.text ? `healthy: ${healthy.text}` : ""];
    this.card = new Card({title: key, words: this.caption(),
      tools, level: own.level, height: own.big ? 460 : 172, group: "metrics", share: unit === "share", unit: unit === "share" ? "%" : "", range: metric.range, healthy, onZoom: page.onZoom,
      ...page.settings().plot});
    this.root = this.card.root;
    this.root.dataset.key = key;
    if (definition) this.card.heading.title = definition;
    if (own.filterable) this.root.append(this.filter());
    this.draw = () => inTurn(this);
    this.readCurves = spaced(() => { this.expire(); this.follow(); }, 2500);
  }

  // Unit and healthy range, and what is to be said of the rows.
  caption(...notes) {
    return [...new Set([...this.words, ...notes])].filter(Boolean).join(" · ");
  }

  filter() {
    const field = el("input", {type: "text", class: "only", placeholder: "all runs; or a filter …", "aria-label": `runs in this chart of ${this.metric.key}`, value: this.own.only || "",
      on: {change: () => this.own.onFilter(field.value)}});
    return field;
  }

  // The keys whose columns make this chart: its values, and of a sample metric their extremes and deviation.
  names() {
    const {key, spread} = this.metric, all = {y: key, ...(spread ? {low: spread.min, high: spread.max, std: spread.std} : {})};
    return Object.entries(all).filter(([, name]) => name);
  }

  // In sight: asks for its numbers and follows them.
  enter() {
    if (this.shown) return;
    this.shown = true;
    this.mode = this.page.settings().lines;
    if (this.byCondition()) { this.follow(); return; }
    for (const [part, name] of this.names()) {
      this.drops.push(this.page.columns.want(name, (list, error) => {
        if (error && part === "y") this.card.fail(error, () => this.page.columns.ask(name));
        if (!list) return;
        this.parts[part] = list;
        this.follow();
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
    Object.values(this.answers).forEach((each) => each.rest());
  }

  // Other settings: what is known is drawn again, and asked for only where the question is another.
  again() {
    if (!this.shown) return;
    if (this.mode !== this.page.settings().lines) { this.leave(); this.enter(); } else this.follow();
    this.draw();
  }

  // Other columns: over another axis, or of other runs.
  renew() {
    const shown = this.shown;
    this.leave();
    this.parts = {};
    if (shown) this.enter();
  }

  byCondition() {
    return this.page.settings().lines === "conditions";
  }

  expire() {
    Object.values(this.answers).forEach((each) => each.expire());
  }

  ask(part, key) {
    const {x, smooth, plot} = this.page.settings();
    this.answers[part] = this.answers[part] || new CurveAnswers(() => this.draw(), (error, retry) => { if (this.byCondition()) this.card.fail(error, retry); });
    this.answers[part].ask({at: this.page.place, key, x, smooth}, plot.zoom);
  }

  // Asks for curves where they are shown: of conditions; of runs some of whose rows were left out, where a part
  // of the x axis is in sight, to have the points of that part.
  follow() {
    if (this.byCondition()) { this.ask("y", this.metric.key); return; }
    for (const [part, name] of this.finer()) this.ask(part, name);
  }

  finer() {
    const thinned = this.page.settings().plot.zoom && (this.parts.y || []).some((run) => run.low);
    return !thinned ? [] : this.parts.y.length <= BANDS_OF ? this.names() : this.names().slice(0, 1);
  }

  // The series of those answers by part; null before all of them are there, or where they are not of the same points.
  fine() {
    const names = this.finer();
    if (!names.length || !names.every(([part]) => this.answers[part] && this.answers[part].exact())) return null;
    const parts = Object.fromEntries(names.map(([part]) => [part, seriesOf(this.answers[part].exact())]));
    const alike = (run, part) => { const other = parts[part].find((each) => each.place === run.place); return !other || (other.x.length === run.x.length && other.x.every((x, i) => x === run.x[i])); };
    return parts.y.every((run) => names.every(([part]) => alike(run, part))) ? parts : null;
  }

  changed() {
    if (this.shown && (this.byCondition() || this.finer().length)) this.readCurves(); else this.expire();
  }

  paint() {
    const settings = this.page.settings(), fits = matches(this.own.only);
    const keep = (label, name) => !this.page.hidden.has(label) && fits(name);
    if (settings.lines === "conditions") {
      const body = this.answers.y && this.answers.y.body();
      if (!body) return;
      const conditions = body.conditions.filter((each) => keep(each.label, each.label));
      const many = conditions.some((each) => each.runs.length > 1);
      this.card.words(this.caption(body.note));
      this.card.set(linesOf({...body, conditions}, settings.thin || !conditions.some((each) => each.mean.length)), {...settings.plot, counts: many ? countsOf({conditions}) : null});
      return;
    }
    if (!this.parts.y) return;
    const parts = this.fine() || this.parts, runs = parts.y.filter((run) => keep(run.label, run.id));
    // Seed by seed, so that no condition lies wholly over another.
    runs.sort((a, b) => (a.seed || 0) - (b.seed || 0) || a.index - b.index);
    const few = runs.length <= BANDS_OF;
    const lines = runs.map((run) => {
      const sparse = run.own || run.y.filter((y) => y !== null).length < 0.5 * run.y.length;
      const [low, high] = few ? band(run, parts, settings.smooth) : [null, null];
      return {group: run.label, name: run.seed === null || run.seed === undefined ? run.label : `${run.label}, seed ${run.seed}`, index: run.index, kind: "run", sparse, x: run.x,
        y: run.y, ...(low ? {low, high} : {})};
    });
    if (few) lines.unshift(...runs.map((run, i) => deviation(run, lines[i], parts, settings.smooth)).filter(Boolean));
    const wrong = runs.find((run) => run.error);
    this.card.words(this.caption(...runs.map((run) => run.note)));
    this.card.set(lines, {...settings.plot, counts: null, emptyWords: wrong ? wrong.error : undefined});
  }

  stop() {
    this.leave();
    waiting.delete(this);
    this.card.stop();
  }
}
