// Where the time of a run's steps went: a row of bars for each step, and the lanes of one step.

import {Choice} from "../components/inputs.js";
import {StepTimes, StepWindow, WINDOW, stepOf} from "../components/step_times.js";
import {Answered, Empty, Loading, Title} from "../components/states.js";
import {plural} from "../format.js";
import {useKeys} from "../keys.js";
import {go, link, useAddress} from "../lib/address.js";
import {EVERY_KIND, useAnswer, useRuns} from "../lib/answer.js";
import {html, useEffect} from "../lib/html.js";
import {nameOf, runName} from "../names.js";

// Rows of the file, one for each step.
function rowsFrom(from) {
  return {from: Math.max(0, from), to: Math.max(0, from) + WINDOW};
}

// Return the changes of the address that lead a step back or forward; null at either end.
function neighbour({shown, from, to, steps}, step, by) {
  const at = shown.indexOf(stepOf(shown, step)) + by;
  if (at >= 0 && at < shown.length) return {step: shown[at].step};
  if (at < 0 && from > 0) return {...rowsFrom(from - WINDOW), step: shown[0].step - 1};
  if (at > 0 && to < steps) return {...rowsFrom(to), step: shown[shown.length - 1].step + 1};
  return null;
}

export function Timeline() {
  const {place} = useAddress();
  const {family: runs, known, error} = useRuns(place);
  // A campaign has no timeline of its own: that of one of its runs is shown.
  const other = runs.length && runs.every((run) => run.place !== place);
  const target = other ? (runs.find((run) => run.state === "running") || runs[0]).place : null;
  useEffect(() => {
    if (target) go(link("timeline", target), {replace: true});
  }, [target]);
  const isKnown = (known || error) && !target;
  return html`<${Title} title="Timeline" words=${nameOf(place)} />
    ${isKnown ? html`<${RunTimeline} runs=${runs} />` : html`<${Loading} />`}`;
}

function RunTimeline({runs}) {
  const {place, query, patch} = useAddress();
  const {from, to} = query;
  const answer = useAnswer("timeline", {at: place, from, to}, {kinds: from ? null : EVERY_KIND});
  const {data} = answer;
  const isFilled = data && data.shown.length > 0;
  const move = (by) => () => {
    const changes = isFilled ? neighbour(data, query.step, by) : null;
    if (changes) patch(changes, {replace: true});
  };
  useKeys({h: ["previous step", move(-1)], l: ["next step", move(1)]});
  const names = runs.map((run) => [run.place, runName(run)]);
  const choose = (value) => go(link("timeline", value));
  return html`<div class="tools">
      <${Choice} label="run" options=${names} value=${place} onChoose=${choose} />
      ${isFilled && html`<${Window} data=${data} />`}
    </div>
    <${Answered} of=${answer}>
      ${(body) =>
        body.shown.length
          ? html`<${StepTimes} ...${body} step=${query.step} choose=${(step) => patch({step})} />`
          : html`<${Empty} title="No times here">This run recorded no spans (timing_spans.jsonl).<//>`}
    <//>`;
}

function Window({data: {shown, steps: count, from, to}}) {
  const {query, patch} = useAddress();
  const newest = () => patch({from: null, to: null, step: null});
  const move = (start) => patch({...rowsFrom(start), step: null});
  const words = `, ${plural(count, "step")} in all; h and l: other steps`;
  return html`<${StepWindow} ...${{shown, from, to, count, words}} onMove=${move}>
    <button type="button" disabled=${!query.from} onClick=${newest}>newest</button>
  <//>`;
}
