// Where the time of a run's steps went: a row of bars for each step, and the lanes of one step.

import {Choice} from "../components/inputs.js";
import {Answered, Empty, Loading} from "../components/states.js";
import {Lanes, StepBars, paintOf} from "../components/time_bars.js";
import {duration, plural} from "../format.js";
import {useKeys} from "../keys.js";
import {useAddress} from "../lib/address.js";
import {useAnswer} from "../lib/answer.js";
import {useCampaign} from "../lib/campaign.js";
import {html, useEffect} from "../lib/html.js";
import {EVERY_KIND} from "../lib/live.js";
import {useWidth} from "../lib/width.js";
import {nameOf, runName} from "../names.js";
import {go, link} from "../router.js";

const WINDOW = 60;

/** @typedef {import("../components/time_bars.js").Step} Step */

// Rows of the file, one for each step.
function rowsFrom(from) {
  return {from: Math.max(0, from), to: Math.max(0, from) + WINDOW};
}

/** @returns {Step | undefined} */
function chosenStep(shown, step) {
  return shown.find((each) => String(each.step) === step) || shown[shown.length - 1];
}

// Return the changes of the address that lead a step back or forward; null at either end.
function neighbour({shown, from, to, steps}, step, by) {
  const at = shown.indexOf(chosenStep(shown, step)) + by;
  if (at >= 0 && at < shown.length) return {step: shown[at].step};
  if (at < 0 && from > 0) return {...rowsFrom(from - WINDOW), step: shown[0].step - 1};
  if (at > 0 && to < steps) return {...rowsFrom(to), step: shown[shown.length - 1].step + 1};
  return null;
}

export function Timeline() {
  const {place} = useAddress();
  const campaign = useCampaign(place);
  const runs = (campaign.data && campaign.data.runs) || [];
  // A campaign has no timeline of its own: that of one of its runs is shown.
  const other = runs.length && runs.every((run) => run.place !== place);
  const target = other ? (runs.find((run) => run.state === "running") || runs[0]).place : null;
  useEffect(() => {
    if (target) go(link("timeline", target), {replace: true});
  }, [target]);
  const options = runs.map((run) => [run.place, runName(run)]);
  const choose = (value) => go(link("timeline", value));
  const known = campaign.data || campaign.error;
  return html`<div class="title"><h1>Timeline</h1><p class="muted">${nameOf(place)}</p></div>
    ${known && !target ? html`<${RunTimeline} place=${place} options=${options} choose=${choose} />` : html`<${Loading} />`}`;
}

/** @param {{place: string, options: any[], choose: (place: string) => void}} props */
function RunTimeline({place, options, choose}) {
  const {query, patch} = useAddress();
  const {from, to} = query;
  const answer = useAnswer("timeline", {at: place, from, to}, {kinds: from ? null : EVERY_KIND});
  const {data} = answer;
  const move = (by) => {
    const changes = data && data.shown.length ? neighbour(data, query.step, by) : null;
    if (changes) patch(changes, {replace: true});
  };
  useKeys({h: ["previous step", () => move(-1)], l: ["next step", () => move(1)]});
  return html`<div class="tools">
      ${options.length > 1 && html`<${Choice} label="run" options=${options} value=${place} onChoose=${choose} />`}
      ${data && data.shown.length > 0 && html`<${Window} data=${data} />`}
    </div>
    <${Answered} of=${answer}>
      ${(body) =>
        body.shown.length
          ? html`<${Steps} body=${body} />`
          : html`<${Empty} title="No times here">This run recorded no spans (timing_spans.jsonl).<//>`}
    <//>`;
}

/** @param {{data: any}} props */
function Window({data: {shown, steps, from, to}}) {
  const {query, patch} = useAddress();
  const button = (text, changes, disabled) =>
    html`<button type="button" disabled=${disabled} onClick=${() => patch(changes)}>${text}</button>`;
  return html`${button("◂ earlier", {...rowsFrom(from - WINDOW), step: null}, from <= 0)}
    ${button("later ▸", {...rowsFrom(to), step: null}, to >= steps)}
    ${button("newest", {from: null, to: null, step: null}, !query.from)}
    <span class="muted small">
      steps ${shown[0].step} to ${shown[shown.length - 1].step}, ${plural(steps, "step")} in all; h and l go from step to
      step
    </span>`;
}

/** @param {{body: any}} props */
function Steps({body: {shown, phases, lanes, cut}}) {
  const {query, patch} = useAddress();
  const [root, wide] = useWidth();
  const paint = paintOf(phases);
  const step = /** @type {Step} */ (chosenStep(shown, query.step));
  const width = Math.max(280, wide - 36);
  const choose = (number) => patch({step: number});
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

/** @param {{steps: Step[], step: Step, paint: Map<string, string>}} props */
function PhaseTable({steps, step, paint}) {
  const sum = (of) => steps.reduce((total, each) => total + of(each), 0);
  const whole = Math.max(
    1e-9,
    sum((each) => each.end - each.start),
  );
  const row = ([name, fill]) => {
    const total = sum((each) => each.seconds[name] || 0);
    return html`<tr key=${name}>
      <td><span class="swatch" style=${{"--series": fill}} aria-hidden="true" />${name}</td>
      <td class="number">${step.seconds[name] ? duration(step.seconds[name]) : "–"}</td>
      <td class="number">${duration(total / steps.length)}</td>
      <td class="number">${((100 * total) / whole).toFixed(1)}%</td>
    </tr>`;
  };
  const heads = [`step ${step.step}`, "mean of these steps", "share"];
  return html`<div class="scroll">
    <table class="tight">
      <thead>
        <tr>
          <th scope="col">phase</th>
          ${heads.map((text) => html`<th scope="col" class="number" key=${text}>${text}</th>`)}
        </tr>
      </thead>
      <tbody>
        ${[...paint].map(row)}
      </tbody>
    </table>
  </div>`;
}
