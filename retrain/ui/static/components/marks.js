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
 *   onToggle?: (name: string) => void}} props
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
      onClick=${() => onToggle(name)}
    >
      ${inside}
    </button>`;
  };
  return html`<div class="legend">${groups.map(entry)}</div>`;
}

/**
 * A line without axes, from its least to its largest value; null where a value is missing.
 * @param {{points: [number, number | null][], label: string, index?: number, width?: number, height?: number}} props
 */
export function Sparkline({points, label, index = 0, width = 110, height = 26}) {
  const known = /** @type {[number, number][]} */ (points.filter(([, y]) => y !== null && Number.isFinite(y)));
  if (!known.length) return html`<span class="muted">–</span>`;
  const [xs, ys] = [known.map(([x]) => x), known.map(([, y]) => y)];
  const [left, low] = [Math.min(...xs), Math.min(...ys)];
  const across = (width - 8) / (Math.max(...xs) - left || 1);
  const up = (height - 8) / (Math.max(...ys) - low || 1);
  const flat = Math.max(...ys) === low;
  const at = ([x, y]) => [4 + (x - left) * across, flat ? height / 2 : height - 4 - (y - low) * up];
  const places = known.map((point) => at(point).map((value) => value.toFixed(1)));
  const [endX, endY] = places[places.length - 1];
  const line = places.map((place) => place.join(",")).join(" ");
  const size = {viewBox: `0 0 ${width} ${height}`, width, height};
  return html`<svg class="spark" ...${size} role="img" aria-label=${label}>
    <polyline points=${line} fill="none" stroke=${colour(index)} stroke-width="1.5" />
    <circle cx=${endX} cy=${endY} r="2.2" fill=${colour(index)} />
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
  return html`<span class="proportion" title=${known ? "95 % interval, number of rollouts" : null}
    ><b>${percent(value, digits)}</b>${rest && html` <small class="muted">${rest}</small>`}</span
  >`;
}
