// Small pictures that stand beside words: swatches, legends, sparklines, shares with their intervals.

import {DASHES, SHAPES, colour, dashOf, shapeOf} from "../colours.js";
import {percent} from "../format.js";
import {html} from "../lib/html.js";
import {button} from "./inputs.js";

export function Mark({index, x, y, r = 3.4, hint}) {
  const title = hint && html`<title>${hint}</title>`;
  return html`<path class="dot" d=${SHAPES[shapeOf(index)](x, y, r)} fill=${colour(index)}>${title}</path>`;
}

function strokeOf(index) {
  return {stroke: colour(index), "stroke-dasharray": DASHES[dashOf(index)].join(" ") || null};
}

export function Swatch({index}) {
  return html`<svg class="key" viewBox="0 0 26 10" width="26" height="10" aria-hidden="true">
    <line x1="0" x2="26" y1="5" y2="5" stroke-width="2" ...${strokeOf(index)} />
    <${Mark} index=${index} x=${13} y=${5} r=${3.2} />
  </svg>`;
}

export function Condition({index, label}) {
  return html`<span class="condition"><${Swatch} index=${index} />${label}</span>`;
}

// One entry for each group; with `onToggle` they are buttons that hide and show it.
export function Legend({groups, onToggle}) {
  const entry = ({name, index, hidden = false, hint = null}) => {
    const inside = html`<${Swatch} index=${index} />${name}`;
    if (!onToggle) return html`<span class="condition" key=${name} title=${hint}>${inside}</span>`;
    const state = {key: name, title: hint, class: hidden ? "off" : null, "aria-pressed": String(!hidden)};
    return button(inside, () => onToggle({name, index}), state);
  };
  return html`<div class="legend">${groups.map(entry)}</div>`;
}

// Lines without axes, from the least to the largest value of all; null where a value is missing.
export function Sparkline({lines, label, width = 110, height = 30}) {
  const known = lines.map(({points, index}) => ({index, points: points.filter(([, y]) => Number.isFinite(y))}));
  const all = known.flatMap(({points}) => points);
  if (!all.length) return html`<span class="muted">–</span>`;
  const [xs, ys] = [all.map(([x]) => x), all.map(([, y]) => y)];
  const [left, low, high] = [Math.min(...xs), Math.min(...ys), Math.max(...ys)];
  const across = (width - 8) / (Math.max(...xs) - left || 1);
  const up = (height - 8) / (high - low || 1);
  const at = ([x, y]) => [4 + (x - left) * across, high === low ? height / 2 : height - 4 - (y - low) * up];
  const line = ({points, index}) => {
    const places = points.map((point) => at(point).map((value) => value.toFixed(1)));
    const [x, y] = at(points[points.length - 1]);
    return html`<polyline points=${places.join(" ")} fill="none" stroke-width="1.5" ...${strokeOf(index)} />
      <${Mark} index=${index} x=${x} y=${y} r=${2.6} />`;
  };
  const size = {viewBox: `0 0 ${width} ${height}`, width, height};
  return html`<svg class="spark" ...${size} role="img" aria-label=${label}>
    ${known.filter(({points}) => points.length).map(line)}
  </svg>`;
}

// A rate of the server: a share of n with its 95 % interval.
export function Rate({rate, n = null, low = null, high = null, digits = 0}) {
  if (rate === null || rate === undefined) return html`<span class="muted">–</span>`;
  const interval =
    low !== null && high !== null && `${percent(low, digits).replace("%", "")}–${percent(high, digits)}`;
  const rest = [interval, n !== null && `n ${n}`].filter(Boolean).join(", ");
  return html`<span class="proportion" title=${interval ? "95 % interval, number of problems" : null}
    ><b>${percent(rate, digits)}</b>${rest && html` <small class="muted">${rest}</small>`}</span
  >`;
}
