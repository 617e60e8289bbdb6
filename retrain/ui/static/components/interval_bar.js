// A verdict as it is drawn: its class (never a new judgement, only the server's word), and its difference with the
// interval as one small bar around zero.

import {niceStep} from "../format.js";
import {html, useId} from "../lib/html.js";

const COLOURS = {up: "var(--good)", down: "var(--bad)", same: "var(--muted)", unclear: "var(--warn)"};

// "cannot tell", interim and exploratory findings are drawn hatched everywhere.
export function isOpen(word) {
  return /^(cannot tell|interim|exploratory)/.test(word || "");
}

export function classOf(word) {
  const short = (word || "").replace(/^typical runs /, "");
  if (/^better/.test(short)) return "up";
  if (/^worse/.test(short)) return "down";
  if (/^(alike|higher|lower)/.test(short)) return "same";
  return "unclear";
}

// Return how far the axis of several differences reaches, so that their bars can be compared.
export function reach(verdicts) {
  const ends = verdicts.flatMap((each) => [each.low, each.high, each.difference, each.margin]);
  const most = Math.max(1e-9, ...ends.filter((value) => Number.isFinite(value)).map(Math.abs));
  const step = niceStep(most / 2);
  return step * Math.ceil(most / step - 1e-9);
}

// A pattern for areas from which nothing may be concluded yet, for an SVG's `<defs>`.
export function Hatch({id, paint}) {
  return html`<pattern id=${id} width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
    <rect width="6" height="6" fill=${paint} fill-opacity="0.1" />
    <rect width="2" height="6" fill=${paint} fill-opacity="0.6" />
  </pattern>`;
}

// `verdict`: {difference, low, high, margin, word, sentence}. `most`: what either end of the bar stands for (`reach`).
export function IntervalBar({verdict, most, width = 190, height = 26}) {
  const id = useId();
  const {difference, low, high, margin, word, sentence} = verdict;
  const x = (value) => width / 2 + Math.max(-1, Math.min(1, value / most)) * (width / 2 - 4);
  const upright = (at, css, from) => html`<line class=${css} x1=${at} x2=${at} y1=${from} y2=${height - from} />`;
  const area = (from, to, down) => ({x: from, width: Math.max(1.5, to - from), y: down, height: height - 2 * down});
  const paint = COLOURS[classOf(word)];
  const fill = isOpen(word) ? {fill: `url(#${id})`} : {fill: paint, "fill-opacity": 0.38};
  const hasEnds = Number.isFinite(low) && Number.isFinite(high);
  const picture = {viewBox: `0 0 ${width} ${height}`, width, height, role: "img"};
  return html`<svg class="bar" ...${picture} aria-label=${`interval of the difference: ${sentence || word}`}>
    <defs><${Hatch} id=${id} paint=${paint} /></defs>
    <line class="grid" x1="4" x2=${width - 4} y1=${height / 2} y2=${height / 2} />
    ${margin && html`<rect class="margin" ...${area(x(-margin), x(margin), 2)} />`}${upright(width / 2, "zero", 1)}
    ${hasEnds && html`<rect ...${area(x(low), x(high), height / 2 - 5)} rx="1.5" ...${fill} />`}
    ${Number.isFinite(difference) && html`<g stroke=${paint} stroke-width="2.5">${upright(x(difference), null, 5)}</g>`}
  </svg>`;
}
