// Pictures of where time went: a bar for each step, and one step's spans in lanes.

import {duration, niceStep, shortened} from "../format.js";
import {html} from "../lib/html.js";

/**
 * @typedef {object} Step
 * @property {number} step
 * @property {number} start in seconds
 * @property {number} end
 * @property {Record<string, number>} seconds by phase
 * @property {[lane: number, begin: number, end: number][]} spans
 */

const PHASES = ["rollout", "score", "credit", "update", "cohort", "eval", "checkpoint", "record"];
const HEIGHT = 210;
const LEFT = 56;
const LANE = 24;

/**
 * Return the colour of each phase: those that every run has in their order, then others.
 * @returns {Map<string, string>}
 */
export function paintOf(names) {
  const all = [...PHASES.filter((name) => names.includes(name)), ...names.filter((name) => !PHASES.includes(name))];
  return new Map(all.map((name, i) => [name, name === "other" ? "var(--line)" : `var(--c${(i % 8) + 1})`]));
}

export function StepBars({steps, paint, chosen, width, choose}) {
  const bottom = HEIGHT - 26;
  const slot = (width - LEFT - 8) / Math.max(1, steps.length);
  const most = Math.max(...steps.map(({start, end}) => Math.max(end - start, 1e-9)));
  const unit = niceStep(most / 4);
  const top = Math.ceil(most / unit) * unit;
  const y = (seconds) => bottom - (seconds / top) * (bottom - 10);
  const every = Math.max(1, Math.ceil(steps.length / Math.max(2, width / 70)));
  const bar = (step, i) => html`<${StepBar}
    key=${step.step}
    step=${step}
    x=${LEFT + i * slot}
    slot=${slot}
    y=${y}
    paint=${paint}
    on=${step.step === chosen}
    choose=${choose}
  />`;
  const number = ({step}, i) =>
    i % every === 0 && html`<text x=${LEFT + (i + 0.5) * slot} y=${bottom + 17} text-anchor="middle">${step}</text>`;
  const label = `time of steps ${steps[0].step} to ${steps[steps.length - 1].step}, by phase`;
  const size = {viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT};
  return html`<svg class="chart" ...${size} role="img" aria-label=${label}>
    ${range(top, unit).map((tick) => html`<${Seconds} tick=${tick} y=${y(tick)} width=${width} />`)}
    ${steps.map(bar)}${steps.map(number)}
  </svg>`;
}

// Return the multiples of `unit` from 0 to `end`.
function range(end, unit) {
  return Array.from({length: Math.floor(end / unit + 1e-9) + 1}, (_, i) => i * unit);
}

function Seconds({tick, y, width}) {
  return html`<line class="grid" x1=${LEFT} x2=${width - 8} y1=${y} y2=${y} />
    <text x=${LEFT - 6} y=${y + 4} text-anchor="end">${tick === 0 ? "0" : duration(tick)}</text>`;
}

function StepBar({step, x, slot, y, paint, on, choose}) {
  const gap = slot > 3 ? 1 : 0;
  const width = Math.max(0.5, slot - gap);
  let sum = 0;
  const parts = [...paint].map(([name, fill]) => {
    const [below, seconds] = [sum, step.seconds[name] || 0];
    sum += seconds;
    const height = Math.max(0.3, y(below) - y(sum));
    const place = {x: x + gap / 2, y: y(sum), width, height};
    return seconds > 0 && html`<rect key=${name} ...${place} fill=${fill} />`;
  });
  const area = {x, width: slot, y: 4, height: y(0) - 4, fill: "transparent"};
  return html`${parts}<rect class=${on ? "column on" : "column"} ...${area} onClick=${() => choose(step.step)}>
      <title>${`step ${step.step}: ${duration(step.end - step.start)}`}</title>
    </rect>`;
}

export function Lanes({step, lanes, paint, width}) {
  const left = 116;
  const used = [...new Set(step.spans.map(([lane]) => lane))].sort((a, b) => a - b);
  const start = Math.min(step.start, ...step.spans.map(([, begin]) => begin));
  const end = Math.max(step.end, ...step.spans.map(([, , stop]) => stop));
  const height = LANE * used.length + 34;
  const x = (at) => left + ((at - start) / Math.max(1e-9, end - start)) * (width - left - 22);
  const tick = (at) =>
    html`<line class="grid" x1=${x(start + at)} x2=${x(start + at)} y1="4" y2=${height - 28} />
      <text x=${x(start + at)} y=${height - 12} text-anchor="middle">${at === 0 ? "0" : duration(at)}</text>`;
  const span = (name, row, [, begin, stop]) => {
    const area = {x: x(begin), width: Math.max(1, x(stop) - x(begin)), y: 6 + row * LANE, height: LANE - 6};
    return html`<rect ...${area} rx="2" fill=${paint.get(name) || "var(--c6)"}>
      <title>${`${name}: ${duration(stop - begin)}`}</title>
    </rect>`;
  };
  const lane = (index, row) => {
    const spans = step.spans.filter((each) => each[0] === index);
    return html`<text class="value" x="0" y=${21 + row * LANE}>${shortened(lanes[index], 16)}</text>
      ${spans.map((each) => span(lanes[index], row, each))}`;
  };
  const words = Object.entries(step.seconds).map(([name, seconds]) => `${name} ${duration(seconds)}`);
  const label = `lanes of step ${step.step}: ${words.join(", ")}`;
  const unit = niceStep((end - start) / Math.max(3, width / 130) || 1);
  const size = {viewBox: `0 0 ${width} ${height}`, width, height};
  return html`<svg class="chart" ...${size} role="img" aria-label=${label}>
    ${range(end - start, unit).map(tick)}${used.map(lane)}
  </svg>`;
}
