// @ts-nocheck
// A chart with its frame: title, what the cursor stands on, files to save, "Why?", and room for the view's own buttons.

import {swatch} from "../colours.js";
import {el, failed, loading, put} from "../dom.js";
import {amount as written, difference, plural} from "../format.js";
import {cursorKeys} from "./cursor_keys.js";
import {csv, last, valueAt} from "./data.js";
import {figure} from "./figure.js";
import {Plot, X_TITLES, xText} from "./plot.js";
import {saveMenu} from "./save.js";

const NAMED = 6;

// A value in the unit of its chart: a share, points of a difference, a number.
function amount(value, share) {
  return share === "points" ? difference(value, true) : written(value, share);
}

// options: those of Plot, and {title, words, tools: [node], share}.
export class Card {
  constructor(options) {
    this.options = options;
    this.lines = [];
    this.reading = el("div", {class: "readout"});
    this.area = el("div", {class: "plot"});
    this.said = el("p", {class: "away", role: "status"});
    this.caption = el("small", null, options.words || "");
    this.heading = el(options.level || "h3", {class: "heading"}, options.title, this.caption);
    this.root = el("figure", {class: "card chartcard", tabindex: "-1"},
      el("div", {class: "head"}, this.heading,
        el("div", {class: "no-print buttons"}, options.tools || null, saveMenu(() => this.export()))),
      this.reading, this.area, this.said);
    this.area.append(loading());
    this.plot = null;
    cursorKeys(this);
  }

  title(text) {
    this.options.title = text;
    put(this.heading, text, this.caption);
  }

  words(text) {
    this.caption.textContent = text;
  }

  // The lines that stand in the legend: means where there are any.
  leading() {
    const means = this.lines.filter((line) => line.kind === "mean");
    return means.length ? means : this.lines.filter((line) => line.kind !== "shade");
  }

  set(lines, changes) {
    Object.assign(this.options, changes);
    this.lines = lines;
    const empty = !lines.some((line) => line.x.length && line.y.some((y) => y !== null && y !== undefined));
    if (empty) {
      this.empty();
      put(this.area, el("p", {class: "state"}, this.options.emptyWords || "No values yet"));
      put(this.reading);
      return;
    }
    if (!this.plot) {
      put(this.area);
      this.plot = new Plot(this.area, {...this.options, onCursor: (x, y) => this.read(x, y)});
    }
    this.plot.set(lines, this.options);
    // Keys move its cursor, so that it is more than a picture.
    for (const [name, value] of [["role", "application"], ["aria-roledescription", "chart"], ["tabindex", "0"], ["aria-label", this.spoken()]]) this.area.setAttribute(name, value);
    if (this.plot.held === null) this.read(null, null); else queueMicrotask(() => this.plot && this.plot.hold(this.plot.held)); // once it is drawn
  }

  fail(error, retry) {
    this.empty();
    put(this.reading);
    put(this.area, failed(error, retry));
  }

  empty() {
    if (this.plot) this.plot.stop();
    this.plot = null;
    for (const name of ["role", "aria-roledescription", "tabindex", "aria-label"]) this.area.removeAttribute(name);
  }

  spoken() {
    const {title, share, x, zoom} = this.options;
    const parts = this.leading().slice(0, 8).map((line) => { const end = last(line, zoom); return end ? `${line.name} ${amount(end.y, share)}` : null; });
    return `${title} over ${X_TITLES[x] || x}, ${plural(this.leading().length, "line")}. Last values: ${parts.filter(Boolean).join(", ")}.`;
  }

  // The values under the cursor, else the last ones; of many runs, the one next to the pointer.
  read(x, y) {
    const {share, x: kind, counts, zoom} = this.options, end = (line) => last(line, zoom);
    const lead = this.leading();
    const shown = lead.length <= NAMED ? lead : [];
    const points = new Map(lead.map((line) => [line, x === null ? end(line) : valueAt(line, x)]));
    // Not every step has a point: the label is the step of the nearest one, and a value of another step names its own.
    const xs = (x === null ? this.lines.map(end) : [...points.values()]).filter(Boolean).map((point) => point.x);
    const at = xs.length ? xs.reduce((a, b) => (x === null ? b > a : Math.abs(b - x) < Math.abs(a - x)) ? b : a) : x;
    const parts = [el("span", {class: "at"}, at === null ? "" : x === null ? `at ${xText(kind, at)}` : xText(kind, at))];
    const elsewhere = (point) => x !== null && point && xText(kind, point.x) !== xText(kind, at) ? ` at ${xText(kind, point.x)}` : "";
    for (const line of shown) {
      const found = points.get(line);
      const of = counts && counts.find((each) => each.index === line.index);
      const n = of && found ? countAt(of, found.x) : null;
      const band = found && line.low && line.low[found.i] !== null && line.low[found.i] !== undefined
        ? ` [${amount(line.low[found.i], share)}, ${amount(line.high[found.i], share)}]` : "";
      parts.push(el("span", {class: "item", title: line.name}, swatch(line.index), el("span", {class: "label"}, line.name),
        el("b", null, found ? amount(found.y, share) : "–"),
        el("span", {class: "muted"}, band, n ? ` n ${n}` : "", elsewhere(found))));
    }
    const others = this.lines.filter((line) => !shown.includes(line) && line.kind !== "shade");
    if (others.length && x !== null && y !== null) {
      let best = null;
      for (const line of others) {
        const found = valueAt(line, x);
        if (found && (!best || Math.abs(found.y - y) < Math.abs(best.found.y - y))) best = {line, found};
      }
      if (best) parts.push(el("span", {class: "item"}, swatch(best.line.index), el("span", {class: "label"}, best.line.name), el("b", null, amount(best.found.y, share)), el("span", {class: "muted"}, elsewhere(best.found))));
    } else if (!shown.length) {
      const values = lead.map((line) => points.get(line)).filter(Boolean).map((found) => found.y);
      if (values.length) parts.push(el("span", {class: "item"}, el("span", {class: "label"}, `${lead.length} runs`), el("b", null, `${amount(Math.min(...values), share)} … ${amount(Math.max(...values), share)}`)));
    }
    if (this.plot && this.plot.limits && this.plot.limits.outside) parts.push(el("span", {class: "muted"}, `${this.plot.limits.outside} values outside`));
    put(this.reading, parts);
  }

  // What stands under the cursor, for those who cannot see it.
  say() {
    const words = (node) => node.children.length ? [...node.children].map((each) => each.textContent.trim()).filter(Boolean).join(" ") : node.textContent;
    this.said.textContent = `${X_TITLES[this.options.x] || this.options.x} ${[...this.reading.children].map(words).filter(Boolean).join(", ")}`;
  }

  export() {
    const {title, x, unit, logX, logY, zoom, zero} = this.options;
    const limits = this.plot && this.plot.limits;
    return {title, csv: () => csv(X_TITLES[x] || x, this.lines), picture: () => figure({title, xKind: x, unit, lines: this.lines, logX, logY, zoom, zero, limits})};
  }

  stop() {
    if (this.plot) this.plot.stop();
  }
}

// The count that holds at x: the one of the last change before it.
function countAt({x: xs, n}, x) {
  let found = 0;
  for (let i = 0; i < xs.length && xs[i] <= x; i += 1) found = n[i];
  return found;
}
