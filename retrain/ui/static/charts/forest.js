// Dots with intervals, a row for each condition: the result of every seed, and paired differences with the margin.

import {colour} from "../colours.js";
import {Hatch} from "../components/interval_bar.js";
import {Mark} from "../components/marks.js";
import {extent, shortened, tickText} from "../format.js";
import {html, useElement, useId} from "../lib/html.js";
import {useWidth} from "../lib/width.js";
import {SaveMenu, standaloneCopy} from "./save.js";
import {linearTicks} from "./ticks.js";

const LETTER = 6.9;
const TOP = 6;

// A card with a picture (its only `svg.chart`) that can be saved.
export function FigureCard({heading, words, title, csv, children}) {
  const root = useElement();
  const picture = () => standaloneCopy(root.current.querySelector("svg.chart"));
  return html`<figure class="card" ref=${root}>
    <div class="head">
      <h2>${heading}${words && html`<small>${words}</small>`}</h2>
      <div class="no-print buttons"><${SaveMenu} get=${() => ({title, csv, picture})} /></div>
    </div>
    ${children}
  </figure>`;
}

// A row: `name` and `index` of its condition, `values` of {value, hint}, their `centre` and `interval` (null: none),
// the numbers in words as `note`, `wider`: the interval on new problems, drawn as a thin line, and `open`: whether
// nothing may be concluded yet.
export function Forest(props) {
  const [root, width] = useWidth();
  return html`<div class="forest" ref=${root}>
    ${width > 0 && html`<${ForestPicture} ...${props} width=${width} />`}
  </div>`;
}

// Return where values lie between 12 and `width - 12`, on an axis of which both ends are ticks.
function axisOf(values, width) {
  let [low, high] = extent(values) || [0, 1];
  if (high - low < 1e-12 * Math.max(1, Math.abs(high))) {
    const room = Math.abs(high) * 0.1 || 0.5;
    [low, high] = [low - room, high + room];
  }
  const {step, ticks} = linearTicks(low, high, Math.max(3, Math.min(7, width / 75)), "", true);
  const [first, last] = [ticks[0], ticks[ticks.length - 1]];
  const at = (value) => 12 + ((value - first) / (last - first)) * (width - 24);
  return Object.assign(at, {step, ticks});
}

function ForestPicture({rows, label, xTitle, unit, zero, margin, width}) {
  // Where a name and its numbers do not fit into one line they take two.
  const narrow = rows.some(({name, note}) => 1.1 * LETTER * (name.length + note.length) + 40 > width);
  const pitch = narrow ? 74 : 58;
  const bottom = TOP + pitch * rows.length;
  const numbers = rows.map((row) => [row.values.map((each) => each.value), row.interval, row.wider, row.centre]);
  const x = axisOf([numbers, zero ? 0 : null, margin ? [margin, -margin] : null].flat(3), width);
  const size = {viewBox: `0 0 ${width} ${bottom + 42}`, width, height: bottom + 42};
  const place = {x, width, narrow, unit};
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
    ${rows.map((row, i) => html`<${Row} key=${row.name} row=${row} top=${TOP + pitch * i} ...${place} />`)}
    <text x=${width / 2} y=${bottom + 36} text-anchor="middle">${xTitle}</text>
  </svg>`;
}

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
    html`<rect x=${x(interval[0])} y=${middle - 6} width=${Math.max(1.5, x(interval[1]) - x(interval[0]))}
      height="12" rx="1.5" fill=${open ? `url(#${hatch})` : paint} fill-opacity=${open ? 1 : 0.3}>
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
