// A chart on a canvas (uPlot): lines, bands over seeds, a healthy range, a strip of counts, one cursor for all charts
// of a page. It draws; what the numbers are was decided on the server.

import {DASHES, css, dashOf, faded, ink} from "../colours.js";
import {number} from "../format.js";
import {aligned, flat, isValue, middle} from "./data.js";
import {STRIP, paintBehind, paintCounts, paintMarks, shapes} from "./paint.js";
import {xSteps, xTexts, yTexts} from "./ticks.js";

/**
 * @typedef {import("./data.js").Line} Line
 * @typedef {object} PlotOptions
 * @property {string} x step, tokens, device, wall or rank
 * @property {string} [unit] of y: "%", "points" or ""
 * @property {number} [height]
 * @property {string} [group] charts of one group share the cursor
 * @property {boolean} [logX]
 * @property {boolean} [logY]
 * @property {boolean} [clip] shows the middle 98 % of the values
 * @property {boolean} [full] shows all of `range`
 * @property {{min: number | null, max: number | null, invert?: boolean} | null} [range] that the values may have
 * @property {import("./paint.js").Healthy | null} [healthy]
 * @property {boolean} [zero] shows zero, and a line there
 * @property {number[] | null} [zoom] the part of x in sight
 * @property {import("./paint.js").Counts[] | null} [counts]
 * @property {import("./paint.js").EventMark[] | null} [marks]
 * @property {((zoom: number[] | null) => void) | null} [onZoom]
 * @property {((x: number, y: number) => void) | null} [onStep] a click at this x, and how high
 * @property {((x: number | null, y: number | null) => void) | null} [onCursor]
 */

const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif';
const STROKES = {mean: [2, 1], run: [1.3, 0.85], thin: [1, 0.28], points: [0, 0.6]};

// Many lines are drawn thinner and lighter, so that none hides the others.
function seriesOf(line, many) {
  const kind = line.kind || "run";
  const [width, alpha] = kind === "run" && many ? [1, 0.5] : STROKES[kind];
  const few = line.x.length < 40 && kind !== "thin";
  const stroke = () => ink(line.index, alpha);
  const show = line.sparse || few || line.x.length === 1;
  return {
    stroke,
    width,
    dash: kind === "mean" ? DASHES[dashOf(line.index)] : [],
    spanGaps: Boolean(line.sparse),
    points: {
      ...{show: show || kind === "mean", size: kind === "mean" ? 6 : 4, fill: stroke, width: 0},
      paths: shapes(line.index, kind === "mean" ? 3.4 : 2.4, show),
    },
  };
}

const LEAST_DRAG = 6; // px
const DOUBLE_CLICK_MS = 300;
const EDGE = {stroke: "transparent", width: 0, points: {show: false}};

// Return the range of the y axis for values from `least` to `most`.
function yRange(/** @type {PlotOptions} */ {range, full, zero, logY, zoom}, limits, least, most) {
  if (least === null || least === undefined || most === null) return logY ? [0.1, 1] : [0, 1];
  let [low, high] = [least, most];
  if (logY) return low === high ? [low / 2, high * 2] : [low / 1.15, high * 1.15];
  if (limits && !zoom) [low, high] = [Math.max(low, limits.low), Math.min(high, limits.high)];
  const {min, max} = range || {min: null, max: null};
  if (min !== null && max !== null && max > min) {
    const inside = low >= min && high <= max;
    if (full || (inside && high - low >= 0.4 * (max - min))) return [Math.min(low, min), Math.max(high, max)];
  }
  if (full && min !== null) low = Math.min(low, min);
  if (full && max !== null) high = Math.max(high, max);
  [low, high] = flat(low, high);
  if (zero) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
  const room = 0.06 * (high - low) || 0.1 * Math.abs(high) || 0.5;
  const floor = low >= 0 && low - room < 0 ? 0 : low - room;
  return [
    min !== null && low >= min ? Math.max(floor, min) : floor,
    max !== null && high <= max ? Math.min(high + room, max) : high + room,
  ];
}

export class Plot {
  /** @param {PlotOptions} options */
  constructor(root, options) {
    this.root = root;
    this.options = options;
    /** @type {Line[]} */
    this.lines = [];
    /** @type {any} */
    this.chart = null;
    /** @type {any[][] | null} */
    this.data = null;
    /** @type {{low: number, high: number, outside: number} | null} */
    this.limits = null;
    this.signature = "";
    /** @type {number | null} where keys have put the cursor */
    this.held = null;
    /** @type {number[] | null} from where to where the lines have ever gone */
    this.ends = null;
    this.watch = new ResizeObserver(() => this.resize());
    this.watch.observe(root);
    this.repaint = () => this.chart && this.chart.redraw(true, true);
    document.addEventListener("theme", this.repaint);
  }

  /** @param {Partial<PlotOptions>} [changes] */
  set(lines, changes) {
    const [signature, kind] = [this.signature, this.options.x];
    Object.assign(this.options, changes);
    const {x: xKind, unit, logX, logY, counts, clip, zoom} = this.options;
    const looks = lines.map((line) => [line.name, line.index, line.kind, Boolean(line.low), Boolean(line.sparse)]);
    this.lines = lines;
    this.signature = JSON.stringify([looks, xKind, unit, logX, logY, counts && counts.length]);
    this.limits = clip ? middle(lines) : null;
    const {x, columns} = aligned(lines, logX ? null : {zoom});
    const positive = (column) => (logY ? column.map((y) => (y > 0 || y === undefined ? y : null)) : column);
    const bands = columns.filter((column) => column[1]).flatMap(([, low, high]) => [positive(low), positive(high)]);
    this.data = [x, ...bands, ...columns.map(([y]) => positive(y))];
    if (kind !== xKind) this.ends = null;
    if (x.length) {
      const [low, high] = this.ends || [x[0], x[x.length - 1]];
      this.ends = [Math.min(low, x[0]), Math.max(high, x[x.length - 1])];
    }
    if (this.chart && signature === this.signature) this.chart.setData(this.data);
    else this.build();
  }

  build() {
    if (this.chart) this.chart.destroy();
    this.chart = null;
    const width = Math.floor(this.root.clientWidth);
    if (!width || !this.data || !this.data[0].length) return;
    const {lines, options} = this;
    const banded = lines.filter((line) => line.low);
    const many = lines.length > 6;
    this.chart = new globalThis.uPlot(
      {
        width,
        height: options.height || 210,
        series: [{}, ...banded.flatMap(() => [EDGE, EDGE]), ...lines.map((line) => seriesOf(line, many))],
        bands: banded.map(({index}, i) => ({series: [2 * i + 2, 2 * i + 1], fill: () => ink(index, 0.16)})),
        legend: {show: false},
        padding: [8, 12, 0, 4],
        scales: {
          x: {time: false, distr: options.logX ? 3 : 1, range: (u, low, high) => this.xRange(low, high)},
          y: {
            distr: options.logY ? 3 : 1,
            dir: options.range && options.range.invert ? -1 : 1,
            range: (u, low, high) => yRange(options, this.limits, low, high),
          },
        },
        axes: this.axes(),
        cursor: {
          y: false,
          sync: {key: options.group, scales: ["x", null]},
          drag: {x: Boolean(options.onZoom), y: false, setScale: false},
          points: {show: false},
          bind: {dblclick: () => null},
          // Where keys have put it, it stays until the pointer really moves.
          move: (u, left, top) => (this.held === null ? [left, top] : [u.valToPos(this.held, "x"), Math.max(0, top)]),
        },
        hooks: {
          drawAxes: [(u) => paintBehind(u, options)],
          draw: [(u) => paintCounts(u, options.counts), (u) => paintMarks(u, options.marks)],
          setCursor: [(u) => this.moved(u)],
          setSelect: [(u) => u.select.width && u.setSelect({left: 0, top: 0, width: 0, height: 0}, false)],
        },
      },
      this.data,
      this.root,
    );
    this.listen(this.chart.over);
  }

  axes() {
    const {options} = this;
    const strip = options.counts ? STRIP * options.counts.length + 3 : 0;
    const axis = {
      stroke: () => css("--muted"),
      font: FONT,
      grid: {stroke: () => faded(css("--line"), 0.8), width: 1},
      ticks: {show: false},
    };
    const across = (u, ticks) => xTexts(options.x, ticks);
    /** @type {(u: any, ticks: any[], axis: number, space: number, step: number) => string[]} */
    const up = (u, ticks, axis, space, step) =>
      options.logY ? ticks.map((tick) => (tick === null ? "" : number(tick))) : yTexts(ticks, step, options.unit);
    const wide = (u, texts) => (texts ? 14 + 6.6 * Math.max(1, ...texts.map((text) => (text || "").length)) : 40);
    const steps = options.logX ? {} : {incrs: xSteps(options.x)};
    return [
      {...axis, size: 24 + strip, gap: 5 + strip, space: 55, values: across, ...steps},
      {...axis, size: wide, gap: 5, space: 32, values: up},
    ];
  }

  /** @param {HTMLElement} over the area of the lines */
  listen(over) {
    const {options} = this;
    let pressedAt = 0;
    over.addEventListener("pointermove", (event) => {
      if (event.movementX || event.movementY) this.held = null;
    });
    let opening = 0;
    over.addEventListener("dblclick", () => {
      clearTimeout(opening);
      if (options.onZoom) options.onZoom(null);
    });
    over.addEventListener("mousedown", (event) => {
      pressedAt = event.clientX;
      const release = ({clientX}) => this.dragged(event.clientX, clientX);
      if (event.button === 0) addEventListener("mouseup", release, {once: true});
    });
    over.addEventListener("click", (event) => {
      if (!options.onStep || Math.abs(event.clientX - pressedAt) > 5) return;
      const x = this.chart.posToVal(this.chart.cursor.left, "x");
      const near = (a, b) => (Math.abs(b - x) < Math.abs(a - x) ? b : a);
      const places = this.places();
      if (!places.length) return;
      const [step, y] = [places.reduce(near), this.chart.posToVal(this.chart.cursor.top, "y")];
      // While a part is in sight, the click may be the first of a double click, which shows all of the axis.
      clearTimeout(opening);
      opening = setTimeout(() => options.onStep && options.onStep(step, y), options.zoom ? DOUBLE_CLICK_MS : 0);
    });
  }

  xRange(low, high) {
    const [a, b] = this.options.zoom || [low, high];
    if (!isValue(a) || !isValue(b)) return [0, 1];
    const [start, end] = [Number(a), Number(b)];
    if (this.options.logX) {
      const first = this.data && this.data[0].find((x) => x > 0);
      return [Math.max(start, first || 1), Math.max(end, 2)];
    }
    return start < end ? [start, end] : [start - 0.5, start + 0.5];
  }

  /** @returns {number[]} every x in sight at which some line has a value */
  places() {
    if (!this.data || !this.chart) return [];
    const [x, ...columns] = this.data;
    const {min, max} = this.chart.scales.x;
    return x.filter((at, i) => at >= min && at <= max && columns.some((column) => isValue(column[i])));
  }

  // Put the cursor of this chart, and of those that follow it, at x; null takes it away.
  hold(x) {
    this.held = x;
    if (!this.chart) return;
    const left = x === null ? -10 : this.chart.valToPos(x, "x");
    this.chart.setCursor({left, top: x === null ? -10 : this.chart.over.clientHeight / 2}, true, true);
  }

  moved(u) {
    const {onCursor} = this.options;
    if (!onCursor) return;
    const {left, top, event} = u.cursor;
    const inside = left >= 0 && left <= u.over.clientWidth;
    const own = event && event.type !== undefined && u.over.matches(":hover");
    onCursor(inside ? u.posToVal(left, "x") : null, inside && own ? u.posToVal(top, "y") : null);
  }

  // Zoom to what the pointer was dragged over. uPlot's own selection follows the pointer a frame late, so that the end
  // of a quick drag is missing from it.
  dragged(fromX, toX) {
    const {chart, options} = this;
    if (!chart || !options.onZoom || Math.abs(toX - fromX) < LEAST_DRAG) return;
    const {left, width} = chart.over.getBoundingClientRect();
    const ends = [fromX, toX].map((x) => Math.min(width, Math.max(0, x - left))).sort((a, b) => a - b);
    options.onZoom(ends.map((x) => chart.posToVal(x, "x")));
  }

  resize() {
    const width = Math.floor(this.root.clientWidth);
    if (!width) return;
    if (!this.chart) this.build();
    else if (width !== this.chart.width) this.chart.setSize({width, height: this.chart.height});
  }

  stop() {
    this.watch.disconnect();
    document.removeEventListener("theme", this.repaint);
    if (this.chart) this.chart.destroy();
    this.chart = null;
  }
}
