// Dots with intervals, a row for each condition: the result of every seed, and paired differences with the margin.

import {colour} from "../colours.js";
import {Hatch} from "../components/interval_bar.js";
import {Mark} from "../components/marks.js";
import {extent, niceStep, shortened, tickText} from "../format.js";
import {html, useId, useRef} from "../lib/html.js";
import {useWidth} from "../lib/width.js";
import {SaveMenu, standaloneCopy} from "./save.js";

/**
 * @typedef {object} ForestRow
 * @property {string} name
 * @property {number} index of the condition
 * @property {{value: number, hint: string}[]} values
 * @property {number | null} centre
 * @property {[number, number] | null} interval
 * @property {string} note the numbers in words
 * @property {[number, number] | null} [wider] the interval on new problems, drawn as a thin line
 * @property {boolean} [open] nothing may be concluded yet
 * @typedef {{label: string, xTitle: string, unit: string, zero?: boolean, margin?: number | null}} ForestOptions
 */

const LETTER = 6.9;
const TOP = 6;

/**
 * Return a linear axis whose ends are ticks, from all the numbers that it must hold.
 * @param {number[]} values
 */
function axis(values, start, end, wanted, stepOf = niceStep) {
  let [low, high] = extent(values) || [0, 1];
  if (high - low < 1e-12 * Math.max(1, Math.abs(high))) {
    const room = Math.abs(high) * 0.1 || 0.5;
    [low, high] = [low - room, high + room];
  }
  const step = stepOf((high - low) / wanted);
  const first = Math.floor(low / step + 1e-9);
  const last = Math.ceil(high / step - 1e-9);
  const at = (/** @type {number} */ value) =>
    start + ((value - first * step) / ((last - first) * step)) * (end - start);
  return Object.assign(at, {step, ticks: Array.from({length: last - first + 1}, (_, i) => (first + i) * step)});
}

/**
 * A card with a picture (its only `svg.chart`) that can be saved.
 * @param {{heading: string, words?: string, title: string, csv: () => string, children?: any}} props
 */
export function FigureCard({heading, words, title, csv, children}) {
  const root = useRef(/** @type {HTMLElement | null} */ (null));
  const picture = () => standaloneCopy(/** @type {HTMLElement} */ (root.current).querySelector("svg.chart"));
  return html`<figure class="card" ref=${root}>
    <div class="head">
      <h2>${heading}${words && html`<small>${words}</small>`}</h2>
      <div class="no-print buttons"><${SaveMenu} get=${() => ({title, csv, picture})} /></div>
    </div>
    ${children}
  </figure>`;
}

// Return a component that draws a picture as wide as there is room.
function wide(Picture) {
  return (props) => {
    const [root, width] = useWidth();
    return html`<div class="forest" ref=${root}>${width > 0 && html`<${Picture} ...${props} width=${width} />`}</div>`;
  };
}

/** @type {(props: ForestOptions & {rows: ForestRow[]}) => any} */
export const Forest = wide(ForestPicture);

/** @param {ForestOptions & {rows: ForestRow[], width: number}} props */
function ForestPicture({rows, label, xTitle, unit, zero, margin, width}) {
  // Where a name and its numbers do not fit into one line they take two.
  const narrow = rows.some(({name, note}) => 1.1 * LETTER * (name.length + note.length) + 40 > width);
  const pitch = narrow ? 74 : 58;
  const bottom = TOP + pitch * rows.length;
  const numbers = rows.flatMap((row) => [
    ...row.values.map((each) => each.value),
    ...[...(row.interval || []), ...(row.wider || [])],
    row.centre,
  ]);
  const known = [...numbers, zero ? 0 : null, ...(margin ? [margin, -margin] : [])].filter(Number.isFinite);
  const wanted = Math.max(3, Math.min(7, width / 75));
  const x = axis(/** @type {number[]} */ (known), 12, width - 12, wanted);
  const size = {viewBox: `0 0 ${width} ${bottom + 42}`, width, height: bottom + 42};
  const tick = (at) => html`<line class="grid" x1=${x(at)} x2=${x(at)} y1=${TOP} y2=${bottom} />
    <text x=${x(at)} y=${bottom + 16} text-anchor="middle">${tickText(at, x.step, unit)}</text>`;
  return html`<svg class="chart" ...${size} role="img" aria-label=${label}>
    ${
      margin &&
      html`<rect class="margin" x=${x(-margin)} y=${TOP} width=${x(margin) - x(-margin)} height=${bottom - TOP}>
        <title>differences that do not matter: ±${tickText(margin, 1e-3, unit)}</title>
      </rect>`
    }
    ${x.ticks.map(tick)} ${zero && html`<line class="zero" x1=${x(0)} x2=${x(0)} y1=${TOP} y2=${bottom} />`}
    ${rows.map((row, i) => {
      const place = {x, top: TOP + pitch * i, width, narrow, unit};
      return html`<${Row} key=${row.name} row=${row} ...${place} />`;
    })}
    <text x=${width / 2} y=${bottom + 36} text-anchor="middle">${xTitle}</text>
  </svg>`;
}

/** @param {{row: ForestRow, x: any, top: number, width: number, narrow: boolean, unit: string}} props */
function Row({row, x, top, width, narrow, unit}) {
  const hatch = useId();
  const {name, index, values, centre, interval, wider, note, open} = row;
  const middle = top + (narrow ? 53 : 37);
  const room = width - 24 - (narrow ? 0 : LETTER * note.length);
  const paint = colour(index);
  const at = narrow ? {x: 12, y: top + 32} : {x: width - 12, y: top + 16, "text-anchor": "end"};
  const ends = ([low, high]) => `95 % interval from ${tickText(low, 1e-3, unit)} to ${tickText(high, 1e-3, unit)}`;
  const bar =
    interval &&
    html`<rect
      x=${x(interval[0])}
      y=${middle - 6}
      width=${Math.max(1.5, x(interval[1]) - x(interval[0]))}
      height="12"
      rx="1.5"
      fill=${open ? `url(#${hatch})` : paint}
      fill-opacity=${open ? 1 : 0.3}
    >
      <title>${ends(interval)}</title>
    </rect>`;
  const thin = wider && {x1: x(wider[0]), x2: x(wider[1]), y1: middle, y2: middle};
  const mark = (each, i) => {
    const y = middle + (values.length > 1 ? ((i % 3) - 1) * 4 : 0);
    return html`<${Mark} key=${i} index=${index} x=${x(each.value)} y=${y} hint=${each.hint} />`;
  };
  const line = centre !== null && {x1: x(centre), x2: x(centre), y1: middle - 11, y2: middle + 11};
  const thinTitle = thin && `new problems: ${ends(wider)}`;
  return html`<g>
    ${open && html`<defs><${Hatch} id=${hatch} paint=${paint} /></defs>`}
    <text class="name" x="12" y=${top + 16}>${shortened(name, Math.max(8, Math.floor(room / (1.1 * LETTER))))}</text>
    <text ...${at}>${note}</text>
    ${thin && html`<line ...${thin} stroke=${paint} stroke-width="1.5"><title>${thinTitle}</title></line>`}
    ${bar}${values.map(mark)}
    ${line && html`<line ...${line} stroke=${paint} stroke-width="3" />`}
  </g>`;
}

const DURATIONS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];

// Return steps at which durations are round.
function timeStep(least) {
  return DURATIONS.find((each) => each >= least) || niceStep(least);
}

// Cost against gain: a point for each condition, its interval upright, the baseline where it costs and gains nothing.
export const Gain = wide(GainPicture);

/**
 * @param {{points: {name: string, index: number, x: number, y: number, interval: [number, number] | null,
 *   hint: string}[], label: string, xTitle: string, xText: (x: number) => string, yTitle: string, unit: string,
 *   width: number}} props
 */
function GainPicture({points, label, xTitle, xText, yTitle, unit, width}) {
  const [height, left] = [250, 58];
  const bottom = height - 40;
  const x = axis([0, ...points.map((each) => each.x)], left, width - 34, Math.max(3, width / 110), timeStep);
  const y = axis([0, ...points.flatMap((each) => [each.y, ...(each.interval || [])])], bottom, 26, 5);
  const row = (tick) => {
    const name = Math.abs(tick) < 1e-12 ? "zero" : "grid";
    return html`<line class=${name} x1=${left} x2=${width - 16} y1=${y(tick)} y2=${y(tick)} />
      <text x=${left - 6} y=${y(tick) + 4} text-anchor="end">${tickText(tick, y.step, unit)}</text>`;
  };
  const point = ({name, index, interval, hint, ...at}) => {
    const text = shortened(name, 30);
    const across = x(at.x);
    const right = across + 9 + text.length * LETTER > width;
    const place = {x: right ? across - 9 : across + 9, y: y(at.y) + (index === 0 && y(at.y) < bottom - 20 ? 17 : -7)};
    const ends = interval && {x1: across, x2: across, y1: y(interval[0]), y2: y(interval[1])};
    return html`${ends && html`<line ...${ends} stroke=${colour(index)} stroke-width="6" opacity="0.3" />`}
      <${Mark} index=${index} x=${across} y=${y(at.y)} r=${5} hint=${hint} />
      <text class="value" ...${place} text-anchor=${right ? "end" : "start"}>${text}</text>`;
  };
  const tick = (at) => html`<text x=${x(at)} y=${bottom + 17} text-anchor="middle">${xText(at)}</text>`;
  const size = {viewBox: `0 0 ${width} ${height}`, width, height};
  return html`<svg class="chart" ...${size} role="img" aria-label=${label}>
    <text x="4" y="14">${yTitle}</text>
    ${y.ticks.map(row)}${x.ticks.map(tick)}${points.map(point)}
    <text x=${(left + width) / 2} y=${height - 6} text-anchor="middle">${xTitle}</text>
  </svg>`;
}
