// Where the time of a run's steps went: a row of bars for each step, and the lanes of one step.

import {Choice, button} from "../components/inputs.js";
import {StepTimes, StepWindow, neighbour, rowsFrom} from "../components/step_times.js";
import {Answered, Empty, Loading, Title} from "../components/states.js";
import {plural} from "../format.js";
import {useKeys} from "../keys.js";
import {go, link, useAddress} from "../lib/address.js";
import {EVERY_KIND, useAnswer, useRuns} from "../lib/answer.js";
import {html, useEffect} from "../lib/html.js";
import {nameOf, runName} from "../names.js";

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
  const sight = isFilled && {shown: data.shown, from: data.from, to: data.to, count: data.steps};
  const walk = (by) => () => {
    const changes = sight && neighbour(sight, query.step, by);
    if (changes) patch(changes, {replace: true});
  };
  useKeys({h: ["previous step", walk(-1)], l: ["next step", walk(1)]});
  const names = runs.map((run) => [run.place, runName(run)]);
  const choose = (value) => go(link("timeline", value));
  const move = (start) => patch({...rowsFrom(start), step: null});
  const newest = () => patch({from: null, to: null, step: null});
  const words = isFilled && `, ${plural(data.steps, "step")} in all; h and l: other steps`;
  const buttons = html`<${StepWindow} ...${sight} words=${words} onMove=${move}>
    ${button("newest", newest, {disabled: !from})}
  <//>`;
  return html`<div class="tools">
      <${Choice} label="run" options=${names} value=${place} onChoose=${choose} />${isFilled && buttons}
    </div>
    <${Answered} of=${answer}>
      ${(body) =>
        body.shown.length
          ? html`<${StepTimes} ...${body} step=${query.step} choose=${(step) => patch({step})} />`
          : html`<${Empty} title="No times here">This run recorded no spans (timing_spans.jsonl).<//>`}
    <//>`;
}
