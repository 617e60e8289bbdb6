// @ts-nocheck
// A chart on a canvas (uPlot): lines, bands over seeds, thin lines behind, a healthy range, a strip of n, one cursor for
// all charts of a page. It draws; what the numbers are was decided on the server.

import {DASHES, css, dashOf, faded, ink} from "../colours.js";
import {count, duration, number, tickText} from "../format.js";
import {aligned, flat, middle} from "./data.js";

const STRIP = 4;
const FONT = '11.5px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif';

export const X_TITLES = {step: "step", tokens: "tokens", device: "device-seconds", wall: "wall clock", rank: "rank kept"};
// What curves of a run can lie over, as choices.
export const X_CHOICES = ["step", "tokens", "device", "wall"].map((each) => [each, `over ${X_TITLES[each]}`]);

const TIMES = new Set(["device", "wall"]);
const TIME_STEPS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];

export function xText(kind, value) {
  return kind === "device" || kind === "wall" ? duration(value) : kind === "tokens" ? count(value) : number(Math.round(value));
}

// Many lines are drawn thinner and lighter, so that none hides the others.
function seriesOf(line, many) {
  const dash = line.kind === "mean" ? DASHES[dashOf(line.index || 0)] : [];
  const [width, alpha] = {mean: [2, 1], run: many ? [1, 0.5] : [1.3, 0.85], thin: [1, 0.28], shade: [0, 0]}[line.kind || "run"];
  const few = line.x.length < 40 && line.kind !== "thin" && line.kind !== "shade";
  return {
    stroke: () => ink(line.index, alpha), width, dash, spanGaps: Boolean(line.sparse),
    points: {show: line.sparse || few || line.x.length === 1, size: line.kind === "mean" ? 6 : 4, fill: () => ink(line.index, alpha), width: 0},
  };
}

function edge() {
  return {stroke: "transparent", width: 0, points: {show: false}};
}

// options: {height, group, x: "step"…, unit, logX, logY, clip, full, range, healthy: {low, high}, zero, zoom: [a, b] | null,
// counts: [{index, x, n}], onZoom([a, b] | null), onCursor(x | null, y | null)}
export class Plot {
  constructor(root, options) {
    this.root = root;
    this.options = options;
    this.lines = [];
    this.chart = null;
    // Where keys have put the cursor, and from where to where the lines have ever gone.
    this.held = null;
    this.ends = null;
    this.watch = new ResizeObserver(() => this.resize());
    this.watch.observe(root);
    this.repaint = () => this.chart && this.chart.redraw(true, true);
    document.addEventListener("theme", this.repaint);
  }

  set(lines, changes) {
    const before = this.signature, kind = this.options.x;
    Object.assign(this.options, changes);
    this.lines = lines;
    this.signature = JSON.stringify([lines.map((line) => [line.name, line.index, line.kind, Boolean(line.low), Boolean(line.sparse)]),
      this.options.x, this.options.unit, this.options.logX, this.options.logY, this.options.counts && this.options.counts.length]);
    this.limits = this.options.clip ? middle(lines) : null;
    const {x, columns} = aligned(lines, this.options.logX ? null : {zoom: this.options.zoom});
    const data = [x];
    const positive = (column) => this.options.logY ? column.map((y) => (y > 0 ? y : y === undefined ? undefined : null)) : column;
    lines.forEach((line, i) => { if (columns[i][1]) data.push(positive(columns[i][1]), positive(columns[i][2])); });
    columns.forEach(([y]) => data.push(positive(y)));
    this.data = data;
    if (kind !== this.options.x) this.ends = null;
    if (x.length) this.ends = this.ends ? [Math.min(this.ends[0], x[0]), Math.max(this.ends[1], x[x.length - 1])] : [x[0], x[x.length - 1]];
    if (this.chart && before === this.signature) this.chart.setData(data);
    else this.build();
  }

  build() {
    if (this.chart) this.chart.destroy();
    this.chart = null;
    const width = Math.floor(this.root.clientWidth);
    if (!width || !this.data[0].length) return;
    const {lines, options} = this;
    const banded = lines.filter((line) => line.low);
    const series = [{}, ...banded.flatMap(() => [edge(), edge()]), ...lines.map((line) => seriesOf(line, lines.length > 6))];
    const bands = banded.map((line, i) => ({series: [2 * i + 2, 2 * i + 1], fill: () => ink(line.index, 0.16)}));
    const strip = options.counts ? STRIP * options.counts.length + 3 : 0;
    const axis = {stroke: () => css("--muted"), font: FONT, grid: {stroke: () => faded(css("--line"), 0.8), width: 1}, ticks: {show: false}};
    this.chart = new globalThis.uPlot({
      width, height: options.height || 210, series, bands, legend: {show: false}, padding: [8, 12, 0, 4],
      scales: {
        x: {time: false, distr: options.logX ? 3 : 1, range: (u, low, high) => this.xRange(low, high)},
        y: {distr: options.logY ? 3 : 1, dir: options.range && options.range.invert ? -1 : 1, range: (u, low, high) => this.yRange(low, high)},
      },
      axes: [
        {...axis, size: 24 + strip, gap: 5 + strip, space: 55,
          values: (u, ticks) => ticks.map((tick) => tick === null ? "" : xText(options.x, tick)), ...(TIMES.has(options.x) ? {incrs: TIME_STEPS} : {})},
        {...axis, size: (u, values) => values ? 14 + 6.6 * Math.max(1, ...values.map((text) => (text || "").length)) : 40, gap: 5, space: 32,
          values: (u, ticks, i, space, step) => ticks.map((tick) => tick === null ? "" : options.logY ? number(tick) : tickText(tick, step, options.unit))},
      ],
      cursor: {
        y: false, sync: {key: options.group, scales: ["x", null]}, drag: {x: Boolean(options.onZoom), y: false, setScale: false},
        points: {show: false}, bind: {dblclick: () => null},
        // Where keys have put it, it stays until the pointer really moves.
        move: (u, left, top) => this.held === null ? [left, top] : [u.valToPos(this.held, "x"), Math.max(0, top)],
      },
      hooks: {
        drawAxes: [(u) => this.behind(u)], draw: [(u) => this.strip(u)],
        setCursor: [(u) => this.moved(u)], setSelect: [(u) => this.selected(u)],
      },
    }, this.data, this.root);
    this.chart.over.addEventListener("pointermove", (event) => { if (event.movementX || event.movementY) this.held = null; });
    this.chart.over.addEventListener("dblclick", () => { if (options.onZoom) options.onZoom(null); });
  }

  xRange(low, high) {
    const [a, b] = this.options.zoom || [low, high];
    if (a === null || a === undefined || b === null) return [0, 1];
    if (this.options.logX) return [Math.max(a, this.data[0].find((x) => x > 0) || 1), Math.max(b, 2)];
    return a < b ? [a, b] : [a - 0.5, a + 0.5];
  }

  yRange(low, high) {
    const {range, full, zero, logY} = this.options;
    if (low === null || high === null || low === undefined) return logY ? [0.1, 1] : [0, 1];
    if (logY) return low === high ? [low / 2, high * 2] : [low / 1.15, high * 1.15];
    if (this.limits && !this.options.zoom) { low = Math.max(low, this.limits.low); high = Math.min(high, this.limits.high); }
    if (range && range.min !== null && range.max !== null && range.max > range.min) {
      const inside = low >= range.min && high <= range.max;
      if (full || (inside && high - low >= 0.4 * (range.max - range.min))) return [Math.min(low, range.min), Math.max(high, range.max)];
    }
    if (full && range && range.min !== null) low = Math.min(low, range.min);  // a range may have one end alone
    if (full && range && range.max !== null) high = Math.max(high, range.max);
    [low, high] = flat(low, high);
    if (zero) { low = Math.min(low, 0); high = Math.max(high, 0); }
    const room = 0.06 * (high - low) || 0.1 * Math.abs(high) || 0.5;
    const floor = low >= 0 && low - room < 0 ? 0 : low - room;
    return [range && range.min !== null && low >= range.min ? Math.max(floor, range.min) : floor,
      range && range.max !== null && high <= range.max ? Math.min(high + room, range.max) : high + room];
  }

  behind(u) {
    const {ctx, bbox} = u, {healthy, zero, logY} = this.options;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    if (healthy && (Number.isFinite(healthy.low) || Number.isFinite(healthy.high)) && u.scales.y.min !== null) {
      const at = (value, other) => Number.isFinite(value) && !(logY && value <= 0) ? u.valToPos(value, "y", true) : other;
      const top = at(healthy.high, bbox.top), bottom = at(healthy.low, bbox.top + bbox.height);
      ctx.fillStyle = faded(css("--good"), 0.09);
      ctx.fillRect(bbox.left, top, bbox.width, bottom - top);
      ctx.strokeStyle = faded(css("--good"), 0.55);
      ctx.setLineDash([3, 4]);
      for (const value of [healthy.low, healthy.high]) {
        if (!Number.isFinite(value) || (logY && value <= 0)) continue;
        const y = Math.round(u.valToPos(value, "y", true)) + 0.5;
        ctx.beginPath(); ctx.moveTo(bbox.left, y); ctx.lineTo(bbox.left + bbox.width, y); ctx.stroke();
      }
    }
    if (zero && !logY) {
      const y = Math.round(u.valToPos(0, "y", true)) + 0.5;
      ctx.setLineDash([]);
      ctx.strokeStyle = css("--muted");
      ctx.beginPath(); ctx.moveTo(bbox.left, y); ctx.lineTo(bbox.left + bbox.width, y); ctx.stroke();
    }
    ctx.restore();
  }

  // How many seeds there are at each x: a row for every condition, the stronger the more.
  strip(u) {
    const {counts} = this.options;
    if (!counts) return;
    const scale = devicePixelRatio || 1, {ctx, bbox} = u;
    const most = Math.max(1, ...counts.flatMap((each) => each.n));
    ctx.save();
    counts.forEach((each, row) => {
      const y = bbox.top + bbox.height + (2 + row * STRIP) * scale;
      for (let i = 0; i < each.x.length;) {
        let j = i;
        while (j + 1 < each.x.length && each.n[j + 1] === each.n[i]) j += 1;
        const from = Math.max(bbox.left, u.valToPos(each.x[i], "x", true));
        const to = Math.min(bbox.left + bbox.width, u.valToPos(each.x[Math.min(j + 1, each.x.length - 1)], "x", true));
        ctx.fillStyle = ink(each.index, 0.12 + 0.88 * each.n[i] / most);
        if (to > from) ctx.fillRect(from, y, to - from, (STRIP - 1) * scale);
        i = j + 1;
      }
    });
    ctx.restore();
  }

  // Where the points in sight lie: every x at which some line has a value.
  places() {
    const [x, ...columns] = this.data, {min, max} = this.chart.scales.x;
    return x.filter((at, i) => at >= min && at <= max && columns.some((column) => column[i] !== null && column[i] !== undefined));
  }

  // The cursor of this chart, and of those that follow it, at x; null takes it away.
  hold(x) {
    this.held = x;
    if (!this.chart) return;
    const left = x === null ? -10 : this.chart.valToPos(x, "x");
    this.chart.setCursor({left, top: x === null ? -10 : this.chart.over.clientHeight / 2}, true, true);
  }

  moved(u) {
    const {onCursor} = this.options;
    if (!onCursor) return;
    const inside = u.cursor.left >= 0 && u.cursor.left <= u.over.clientWidth;
    const own = u.cursor.event && u.cursor.event.type !== undefined && u.over.matches(":hover");
    onCursor(inside ? u.posToVal(u.cursor.left, "x") : null, inside && own ? u.posToVal(u.cursor.top, "y") : null);
  }

  selected(u) {
    const {left, width} = u.select;
    if (width < 6) return;
    const range = [u.posToVal(left, "x"), u.posToVal(left + width, "x")];
    u.setSelect({left: 0, top: 0, width: 0, height: 0}, false);
    if (this.options.onZoom && u.over.matches(":hover")) this.options.onZoom(range);
  }

  resize() {
    const width = Math.floor(this.root.clientWidth);
    if (!this.chart) { if (width && this.data) this.build(); return; }
    if (width && width !== this.chart.width) this.chart.setSize({width, height: this.chart.height});
  }

  stop() {
    this.watch.disconnect();
    document.removeEventListener("theme", this.repaint);
    if (this.chart) this.chart.destroy();
    this.chart = null;
  }
}
