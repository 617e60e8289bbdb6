// Where the seconds of some steps went: a bar for each, the spans of one in lanes, and a table of their phases. A step
// has its number (`step`), its `start` and `end`, its `seconds` by phase, and `spans` of [lane, begin, end].

import {linearTicks} from "../charts/ticks.js";
import {duration, percent, shortened} from "../format.js";
import {html} from "../lib/html.js";
import {useWidth} from "../lib/width.js";
import {button} from "./inputs.js";
import {Table, numberColumn} from "./table.js";

const PHASES = ["rollout", "score", "credit", "update", "cohort", "eval", "checkpoint", "record"];
const HEIGHT = 210;
const BOTTOM = HEIGHT - 26;
const LEFT = 56;
const LANE = 24;

// The step of this number, else the last one before it: a run may lack steps. Without a number, the last one.
export function stepOf(shown, number) {
  return shown.findLast((each) => !number || each.step <= Number(number)) || shown[0];
}

/** @returns {[phase: string, colour: string][]} */
function paintOf(names) {
  const all = [...PHASES.filter((name) => names.includes(name)), ...names.filter((name) => !PHASES.includes(name))];
  return all.map((name, i) => [name, name === "other" ? "var(--line)" : `var(--c${(i % 8) + 1})`]);
}

export const WINDOW = 60;

export function rowsFrom(from) {
  const first = Math.max(0, from);
  return {from: first, to: first + WINDOW};
}

/** Return the changes of window and step that lead a step back or forward; null at either end. */
export function neighbour({shown, from, to, count}, step, by) {
  const at = shown.indexOf(stepOf(shown, step)) + by;
  if (at >= 0 && at < shown.length) return {step: String(shown[at].step)};
  if (at < 0 && from > 0) return {...rowsFrom(from - WINDOW), step: String(shown[0].step - 1)};
  if (at > 0 && to < count) return {...rowsFrom(to), step: String(shown[shown.length - 1].step + 1)};
  return null;
}

// Buttons that lead to the steps before and behind those `shown`, which are `from` to `to` of `count` rows.
export function StepWindow({shown, from, to, count, words, onMove, children = null}) {
  return html`${button("◂ earlier", () => onMove(from - WINDOW), {disabled: from <= 0})}
    ${button("later ▸", () => onMove(to), {disabled: to >= count})}${children}
    <span class="muted small">steps ${shown[0].step} to ${shown[shown.length - 1].step}${words}</span>`;
}

export function StepTimes({shown, phases, lanes, cut = false, step: number, choose}) {
  const [root, wide] = useWidth();
  const paint = paintOf(phases);
  const step = stepOf(shown, number);
  const width = Math.max(280, wide - 36);
  const pictures = html`<figure class="card">
      <h2>Steps <small>a bar for each step, its phases from the bottom; a click shows a step's lanes</small></h2>
      <${StepBars} steps=${shown} paint=${paint} chosen=${step.step} width=${width} choose=${choose} />
    </figure>
    <figure class="card below">
      <h2>
        Step ${step.step}
        <small>${duration(step.end - step.start)}; what runs at the same time stands in lanes</small>
      </h2>
      <${Lanes} step=${step} lanes=${lanes} paint=${new Map(paint)} width=${width} />
    </figure>`;
  return html`<div ref=${root}>
    ${wide > 0 && pictures}<${PhaseTable} steps=${shown} step=${step} paint=${paint} />
    ${cut && html`<p class="muted small">Not all spans of these steps are drawn: look at fewer of them.</p>`}
  </div>`;
}

function PhaseTable({steps, step, paint}) {
  const sum = (of) => steps.reduce((total, each) => total + of(each), 0);
  const total = (name) => sum((each) => each.seconds[name] || 0);
  const all = sum((each) => each.end - each.start) || 1e-9;
  const name = ([text, fill]) => html`<span class="swatch" style=${{"--series": fill}} aria-hidden="true" />${text}`;
  const column = (key, title, text) => numberColumn(key, title, ([phase]) => text(phase));
  const columns = [
    {key: "phase", title: "phase", cell: name},
    column("step", `step ${step.step}`, (phase) => (step.seconds[phase] ? duration(step.seconds[phase]) : "–")),
    column("mean", "mean of these steps", (phase) => duration(total(phase) / steps.length)),
    column("share", "share", (phase) => percent(total(phase) / all)),
  ];
  return html`<${Table} label="phases" columns=${columns} rows=${paint} keyOf=${([phase]) => phase} />`;
}

function Picture({width, height, label, children}) {
  const size = {viewBox: `0 0 ${width} ${height}`, width, height};
  return html`<svg class="chart" ...${size} role="img" aria-label=${label}>${children}</svg>`;
}

const timeText = (seconds) => (seconds === 0 ? "0" : duration(seconds));

function StepBars({steps, paint, chosen, width, choose}) {
  const slot = (width - LEFT - 8) / Math.max(1, steps.length);
  const most = Math.max(...steps.map(({start, end}) => Math.max(end - start, 1e-9)));
  const {ticks} = linearTicks(0, most, 4, "", true);
  const top = ticks[ticks.length - 1];
  const y = (seconds) => BOTTOM - (seconds / top) * (BOTTOM - 10);
  const every = Math.max(1, Math.ceil(steps.length / Math.max(2, width / 70)));
  const tick = (at) => html`<line class="grid" x1=${LEFT} x2=${width - 8} y1=${y(at)} y2=${y(at)} />
    <text x=${LEFT - 6} y=${y(at) + 4} text-anchor="end">${timeText(at)}</text>`;
  const bar = ({step, start, end, seconds}, i) => {
    const x = LEFT + i * slot;
    const gap = slot > 3 ? 1 : 0;
    let sum = 0;
    const parts = paint.map(([name, fill]) => {
      const below = sum;
      sum += seconds[name] || 0;
      const size = {width: Math.max(0.5, slot - gap), height: Math.max(0.3, y(below) - y(sum))};
      return sum > below && html`<rect key=${name} x=${x + gap / 2} y=${y(sum)} ...${size} fill=${fill} />`;
    });
    const area = {x, width: slot, y: 4, height: y(0) - 4, fill: "transparent"};
    return html`${parts}
      <rect class=${step === chosen ? "column on" : "column"} ...${area} onClick=${() => choose(step)}>
        <title>${`step ${step}: ${duration(end - start)}`}</title>
      </rect>
      ${i % every === 0 && html`<text x=${x + slot / 2} y=${BOTTOM + 17} text-anchor="middle">${step}</text>`}`;
  };
  const label = `time of steps ${steps[0].step} to ${steps[steps.length - 1].step}, by phase`;
  return html`<${Picture} width=${width} height=${HEIGHT} label=${label}>
    ${ticks.map(tick)}${steps.map(bar)}
  <//>`;
}

function Lanes({step, lanes, paint, width}) {
  const left = 116;
  const used = [...new Set(step.spans.map(([lane]) => lane))].sort((a, b) => a - b);
  const start = Math.min(step.start, ...step.spans.map(([, begin]) => begin));
  const end = Math.max(step.end, ...step.spans.map(([, , stop]) => stop));
  const height = LANE * used.length + 34;
  const x = (at) => left + ((at - start) / Math.max(1e-9, end - start)) * (width - left - 22);
  const tick = (at) => html`<line class="grid" x1=${x(start + at)} x2=${x(start + at)} y1="4" y2=${height - 28} />
    <text x=${x(start + at)} y=${height - 12} text-anchor="middle">${timeText(at)}</text>`;
  const lane = (index, row) => {
    const span = ([, begin, stop]) => {
      const area = {x: x(begin), width: Math.max(1, x(stop) - x(begin)), y: 6 + row * LANE, height: LANE - 6};
      return html`<rect ...${area} rx="2" fill=${paint.get(lanes[index]) || "var(--c6)"}>
        <title>${`${lanes[index]}: ${duration(stop - begin)}`}</title>
      </rect>`;
    };
    return html`<text class="value" x="0" y=${21 + row * LANE}>${shortened(lanes[index], 16)}</text>
      ${step.spans.filter((each) => each[0] === index).map(span)}`;
  };
  const words = Object.entries(step.seconds).map(([name, seconds]) => `${name} ${duration(seconds)}`);
  const {ticks} = linearTicks(0, end - start, Math.max(3, width / 130));
  return html`<${Picture} width=${width} height=${height} label=${`lanes of step ${step.step}: ${words.join(", ")}`}>
    ${ticks.map(tick)}${used.map(lane)}
  <//>`;
}
