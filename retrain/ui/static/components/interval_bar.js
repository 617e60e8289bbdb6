// A paired difference with its interval as one small bar around zero.

import {html, useId} from "../lib/html.js";
import {classOf, isOpen} from "../verdicts.js";

const COLOURS = {up: "var(--good)", down: "var(--bad)", same: "var(--muted)", unclear: "var(--warn)"};

// A pattern for areas from which nothing may be concluded yet, for an SVG's `<defs>`.
export function Hatch({id, paint}) {
  return html`<pattern id=${id} width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
    <rect width="6" height="6" fill=${paint} fill-opacity="0.1" />
    <rect width="2" height="6" fill=${paint} fill-opacity="0.6" />
  </pattern>`;
}

// `verdict`: {difference, low, high, margin, word, sentence}. `most`: what either end of the bar stands for (`reach`
// in verdicts.js).
export function IntervalBar({verdict, most, width = 190, height = 26}) {
  const id = useId();
  const {difference, low, high, margin, word} = verdict;
  const x = (value) => width / 2 + Math.max(-1, Math.min(1, value / most)) * (width / 2 - 4);
  const middle = height / 2;
  const paint = COLOURS[classOf(word)];
  const open = isOpen(word);
  const label = `interval of the difference: ${verdict.sentence || word}`;
  const margins =
    margin &&
    html`<rect class="margin" x=${x(-margin)} width=${x(margin) - x(-margin)} y="2" height=${height - 4} />`;
  const interval =
    Number.isFinite(low) &&
    Number.isFinite(high) &&
    html`<rect
      x=${x(low)}
      width=${Math.max(1.5, x(high) - x(low))}
      y=${middle - 5}
      height="10"
      rx="1.5"
      fill=${open ? `url(#${id})` : paint}
      fill-opacity=${open ? 1 : 0.38}
    />`;
  const centre =
    Number.isFinite(difference) &&
    html`<line
      x1=${x(difference)}
      x2=${x(difference)}
      y1=${middle - 8}
      y2=${middle + 8}
      stroke=${paint}
      stroke-width="2.5"
    />`;
  return html`<svg
    class="bar"
    viewBox=${`0 0 ${width} ${height}`}
    width=${width}
    height=${height}
    role="img"
    aria-label=${label}
  >
    <defs><${Hatch} id=${id} paint=${paint} /></defs>
    <line class="grid" x1="4" x2=${width - 4} y1=${middle} y2=${middle} />
    ${margins}
    <line class="zero" x1=${width / 2} x2=${width / 2} y1="1" y2=${height - 1} />
    ${interval}${centre}
  </svg>`;
}
