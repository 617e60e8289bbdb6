// A sample metric over the rollouts of a step, and over all steps: the histogram and how it moved.

import {Distribution as Histogram, WIDTH} from "../charts/histogram.js";
import {AddressChoice, RunChoice} from "../components/inputs.js";
import {Answered, ClosableHead} from "../components/states.js";
import {number, plural} from "../format.js";
import {useAddress} from "../lib/address.js";
import {useAnswer} from "../lib/answer.js";
import {html} from "../lib/html.js";
import {Steps} from "./reading.js";

const HEIGHT = 230;
const BOTTOM = HEIGHT - 38;
const TOP = 12;
const RIGHT = WIDTH - 10;
const SIZE = {class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, width: WIDTH, height: HEIGHT, role: "img"};

// Columns of shares: the darker, the larger a share of the step's rollouts. A click goes to the step.
function Heat({over: {steps, edges, counts}, name, chosen, onStep}) {
  const left = 52;
  const wide = (RIGHT - left) / Math.max(1, steps.length);
  const tall = (BOTTOM - TOP) / Math.max(1, edges.length - 1);
  const shares = counts.map((row) => {
    const total = row.reduce((sum, n) => sum + n, 0) || 1;
    return row.map((n) => n / total);
  });
  const most = Math.max(0.01, ...shares.flat());
  const cell = (share, i, j) => {
    const place = {x: left + i * wide, y: BOTTOM - (j + 1) * tall, width: wide + 0.2, height: tall + 0.2};
    return (
      share > 0 && html`<rect ...${place} fill="var(--c1)" fill-opacity=${Math.sqrt(share / most).toFixed(3)} />`
    );
  };
  const column = (step, i) => {
    const place = {x: left + i * wide, y: TOP, width: wide, height: BOTTOM - TOP};
    const style = step === chosen ? "column on" : "column";
    const choose = () => onStep(step);
    return html`${shares[i].map((share, j) => cell(share, i, j))}
      <rect ...${place} fill="transparent" class=${style} onClick=${choose}><title>step ${step}</title></rect>`;
  };
  const label = (i) => {
    const edge = Math.round((i * (edges.length - 1)) / 4);
    return html`<text x=${left - 6} y=${BOTTOM - edge * tall + 4} text-anchor="end">${number(edges[edge])}</text>`;
  };
  const every = Math.max(1, Math.ceil(steps.length / 8));
  const tick = (step, i) =>
    i % every === 0 && html`<text x=${left + (i + 0.5) * wide} y=${BOTTOM + 16} text-anchor="middle">${step}</text>`;
  return html`<svg ...${SIZE} aria-label=${`${name} over steps`}>
    ${steps.map(column)} ${[0, 1, 2, 3, 4].map(label)} ${steps.map(tick)}
    <text x=${(left + WIDTH) / 2} y=${HEIGHT - 4} text-anchor="middle">step</text>
  </svg>`;
}

export function Distribution({place, runs}) {
  const {query, patch} = useAddress();
  const {hist: name, step} = query;
  const run = query.run || (runs.length ? runs[0].place : place);
  const answer = useAnswer("histogram", {at: run, metric: name, step});
  const {data: at} = answer;
  const whole = useAnswer("histogram", {at: run, metric: name, over: "steps"});
  const over = whole.isCurrent ? whole.data : null;
  const steps = over && over.steps.length ? over.steps : at ? [at.step] : [];
  const slide = (to) => patch({step: to}, {replace: true});
  const overSteps =
    over &&
    html`<div>
      <h3>Over steps<small>the darker, the larger a share of the step's rollouts; a click goes to the step</small></h3>
      <${Heat} over=${over} name=${name} chosen=${at && at.step} onStep=${(to) => patch({step: to})} />
    </div>`;
  const content = () => {
    const {counts, edges} = at;
    const many = counts.reduce((sum, n) => sum + n, 0);
    const words = plural(many, "rollout");
    const histogram = {title: `${name} at step ${at.step}`, words, rows: [{counts}], edges, name, noun: "rollout"};
    return html`<div class="tools">
        <${RunChoice} runs=${runs} run=${run} resets=${{step: null}} />
        <${AddressChoice} name="hist" label="what" options=${at.names.map((each) => [each, each])} usual=${null} />
        <${Steps} label="step" steps=${steps} step=${at.step} onStep=${slide} hasKeys=${true} />
        <span class="muted small">h and l step back and forward</span>
      </div>
      <div class="two">
        <${Histogram} ...${histogram} />${overSteps}
      </div>`;
  };
  const close = () => patch({hist: null, run: null, step: null});
  return html`<div class="histplace"><section class="card wide">
    <${ClosableHead} title=${`Distribution of ${name}`} onClose=${close} />
    <${Answered} of=${answer}>${content}<//>
  </section></div>`;
}
