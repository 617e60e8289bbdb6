// How values are distributed: a row of bars for each condition, all on one axis.

import {colour} from "../colours.js";
import {number, plural, shortened, tickText} from "../format.js";
import {html} from "../lib/html.js";
import {FigureCard} from "./forest.js";
import {table} from "./save.js";
import {linearTicks} from "./ticks.js";

export const WIDTH = 520;
const LEFT = 34;
const RIGHT = WIDTH - 10;

// `most`: what the whole height stands for.
function Bars({row: {counts, name, index = 0, note}, edges, most, noun, x, top, bottom}) {
  const y = (n) => bottom - (n / most) * (bottom - top);
  const line = (n) => html`<line class="grid" x1=${LEFT} x2=${RIGHT} y1=${y(n)} y2=${y(n)} />
    <text x="28" y=${y(n) + 4} text-anchor="end">${n}</text>`;
  const bar = (n, i) => {
    const width = Math.max(1, x(edges[i + 1]) - x(edges[i]) - 1);
    const words = `${plural(n, noun)} from ${number(edges[i])} to ${number(edges[i + 1])}`;
    const size = {x: x(edges[i]) + 0.5, y: y(n), width, height: bottom - y(n)};
    return n > 0 && html`<rect ...${size} fill=${colour(index)} rx="1"><title>${words}</title></rect>`;
  };
  const whole = Math.floor(most + 1e-9);
  return html`${[...new Set([0, Math.ceil(whole / 2), whole])].map(line)} ${counts.map(bar)}
    ${name && html`<text class="name" x=${LEFT} y=${top - 8}>${shortened(name, 50)}</text>`}
    ${note && html`<text x=${RIGHT} y=${top - 8} text-anchor="end">${note}</text>`}`;
}

// A card of histograms of the values called `name`; `noun`: what is counted. A row has `counts`, and may have `name`,
// `index` of its condition and `note`.
export function Distribution({title, words, rows, edges, name, noun = "completion"}) {
  const csv = () => {
    const bins = rows[0].counts.map((_, i) => [edges[i], edges[i + 1], ...rows.map(({counts}) => counts[i])]);
    return table([`${name} from`, "to", ...rows.map((row) => row.name || `${noun}s`)], bins);
  };
  const noted = rows.map((row) => `${row.name || ""} ${row.note || words}`.trim());
  return html`<${FigureCard} heading=${title} words=${words} title=${title} csv=${csv}>
    <${Histograms} ...${{rows, edges, name, noun, label: `${title}: ${noted.join("; ")}`}} />
  <//>`;
}

// Rows are drawn to one scale of shares, so that conditions with unlike counts can be compared.
function Histograms({rows, edges, name, noun, label}) {
  const [low, high] = edges.length ? [edges[0], edges[edges.length - 1]] : [0, 1];
  const x = (value) => LEFT + ((value - low) / (high - low || 1)) * (RIGHT - LEFT);
  const totals = rows.map(({counts}) => counts.reduce((sum, n) => sum + n, 0) || 1);
  const tallest = Math.max(...rows.map(({counts}, i) => Math.max(1, ...counts) / totals[i]));
  const [pitch, head] = rows.length > 1 ? [104, 28] : [192, 12];
  const bottom = pitch * rows.length;
  const isWhole = low % 1 !== 0 && edges[1] - low === 1; // each bin is around a whole number
  const ticks = linearTicks(low, high, 6, isWhole ? "step" : "");
  const tick = (value) =>
    html`<text x=${x(value)} y=${bottom + 16} text-anchor="middle">${tickText(value, ticks.step, "")}</text>`;
  const row = (each, i) => {
    const place = {edges, noun, x, most: tallest * totals[i], top: pitch * i + head, bottom: pitch * (i + 1)};
    return html`<${Bars} row=${each} ...${place} />`;
  };
  const size = {viewBox: `0 0 ${WIDTH} ${bottom + 38}`, width: WIDTH, height: bottom + 38};
  return html`<svg class="chart" ...${size} role="img" aria-label=${label}>
    ${rows.map(row)} ${ticks.ticks.map(tick)}
    <text x=${WIDTH / 2} y=${bottom + 34} text-anchor="middle">${name}</text>
  </svg>`;
}
