// Where the seconds of some steps went: a bar for each, the spans of one in lanes, and a table of their phases.

import {duration, percent} from "../format.js";
import {html} from "../lib/html.js";
import {useWidth} from "../lib/width.js";
import {Table} from "./table.js";
import {Lanes, StepBars, paintOf} from "./time_bars.js";

/** @typedef {import("./time_bars.js").Step} Step */

// Return the step of this number, or the last one.
export function stepOf(shown, number) {
  return shown.find((each) => String(each.step) === number) || shown[shown.length - 1];
}

export function StepTimes({shown, phases, lanes, cut, step: number, choose}) {
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
      <${Lanes} step=${step} lanes=${lanes} paint=${paint} width=${width} />
    </figure>`;
  return html`<div ref=${root}>
    ${wide > 0 && pictures}
    <${PhaseTable} steps=${shown} step=${step} paint=${paint} />
    ${cut && html`<p class="muted small">Not all spans of these steps are drawn: look at fewer of them.</p>`}
  </div>`;
}

function PhaseTable({steps, step, paint}) {
  const sum = (of) => steps.reduce((total, each) => total + of(each), 0);
  const whole = Math.max(
    1e-9,
    sum((each) => each.end - each.start),
  );
  const total = (name) => sum((each) => each.seconds[name] || 0);
  const name = ([text, fill]) => html`<span class="swatch" style=${{"--series": fill}} aria-hidden="true" />${text}`;
  const columns = [
    {key: "phase", title: "phase", cell: name},
    {
      ...{key: "step", title: `step ${step.step}`, number: true},
      cell: ([phase]) => (step.seconds[phase] ? duration(step.seconds[phase]) : "–"),
    },
    {
      ...{key: "mean", title: "mean of these steps", number: true},
      cell: ([phase]) => duration(total(phase) / steps.length),
    },
    {key: "share", title: "share", number: true, cell: ([phase]) => percent(total(phase) / whole)},
  ];
  return html`<${Table} label="phases" columns=${columns} rows=${[...paint]} keyOf=${([phase]) => phase} />`;
}
