// Small pictures that stand beside words: swatches, legends, sparklines, shares with their intervals.

import {DASHES, SHAPES, colour, dashOf, shapeOf} from "../colours.js";
import {percent} from "../format.js";
import {html} from "../lib/html.js";

/**
 * A condition's mark at a place of an SVG picture.
 * @param {{index: number, x: number, y: number, r?: number, hint?: string}} props
 */
export function Mark({index, x, y, r = 3.4, hint}) {
  const title = hint && html`<title>${hint}</title>`;
  return html`<path class="dot" d=${SHAPES[shapeOf(index)](x, y, r)} fill=${colour(index)}>${title}</path>`;
}

/**
 * Colour, dash and shape of a condition, as its lines and marks have them.
 * @param {{index: number}} props
 */
export function Swatch({index}) {
  return html`<svg class="key" viewBox="0 0 26 10" width="26" height="10" aria-hidden="true">
    <line
      x1="0"
      x2="26"
      y1="5"
      y2="5"
      stroke=${colour(index)}
      stroke-width="2"
      stroke-dasharray=${DASHES[dashOf(index)].join(" ") || null}
    />
    <${Mark} index=${index} x=${13} y=${5} r=${3.2} />
  </svg>`;
}

/** @param {{index: number, children?: any}} props */
export function Condition({index, children}) {
  return html`<span class="condition"><${Swatch} index=${index} />${children}</span>`;
}

/**
 * One entry for each group; with `onToggle` they are buttons that hide and show it.
 * @param {{groups: {name: string, index: number, hidden?: boolean, hint?: string}[],
 *   onToggle?: (group: {name: string, index: number}) => void}} props
 */
export function Legend({groups, onToggle}) {
  const entry = (/** @type {any} */ {name, index, hidden, hint}) => {
    const inside = html`<${Swatch} index=${index} />${name}`;
    if (!onToggle) return html`<span class="condition" key=${name} title=${hint}>${inside}</span>`;
    return html`<button
      type="button"
      key=${name}
      title=${hint}
      class=${hidden ? "off" : null}
      aria-pressed=${hidden ? "false" : "true"}
      onClick=${() => onToggle({name, index})}
    >
      ${inside}
    </button>`;
  };
  return html`<div class="legend">${groups.map(entry)}</div>`;
}

/**
 * Lines without axes, from the least to the largest value of all; null where a value is missing.
 * @param {{lines: {points: [number, number | null][], index: number}[], label: string, width?: number,
 *   height?: number}} props
 */
export function Sparkline({lines, label, width = 110, height = 30}) {
  const known = lines.map(({points, index}) => ({
    index,
    points: /** @type {[number, number][]} */ (points.filter(([, y]) => y !== null && Number.isFinite(y))),
  }));
  const all = known.flatMap(({points}) => points);
  if (!all.length) return html`<span class="muted">–</span>`;
  const [xs, ys] = [all.map(([x]) => x), all.map(([, y]) => y)];
  const [left, low, high] = [Math.min(...xs), Math.min(...ys), Math.max(...ys)];
  const across = (width - 8) / (Math.max(...xs) - left || 1);
  const up = (height - 8) / (high - low || 1);
  const at = ([x, y]) => [4 + (x - left) * across, high === low ? height / 2 : height - 4 - (y - low) * up];
  const line = ({points, index}) => {
    const places = points.map((point) => at(point).map((value) => value.toFixed(1)));
    const stroke = {stroke: colour(index), "stroke-dasharray": DASHES[dashOf(index)].join(" ") || null};
    const [x, y] = at(points[points.length - 1]);
    return html`<polyline points=${places.join(" ")} fill="none" stroke-width="1.5" ...${stroke} />
      <${Mark} index=${index} x=${x} y=${y} r=${2.6} />`;
  };
  const size = {viewBox: `0 0 ${width} ${height}`, width, height};
  return html`<svg class="spark" ...${size} role="img" aria-label=${label}>
    ${known.filter(({points}) => points.length).map(line)}
  </svg>`;
}

/**
 * A share of n with its 95 % interval, as the server computed them.
 * @param {{value: number | null | undefined, n?: number | null, low?: number | null, high?: number | null,
 *   digits?: number}} props
 */
export function Rate({value, n, low, high, digits = 0}) {
  if (value === null || value === undefined) return html`<span class="muted">–</span>`;
  const known = low !== null && low !== undefined && high !== null && high !== undefined;
  const interval = known ? `${percent(low, digits).replace("%", "")}–${percent(high, digits)}` : null;
  const rest = [interval, n === null || n === undefined ? null : `n ${n}`].filter(Boolean).join(", ");
  return html`<span class="proportion" title=${known ? "95 % interval, number of problems" : null}
    ><b>${percent(value, digits)}</b>${rest && html` <small class="muted">${rest}</small>`}</span
  >`;
}
