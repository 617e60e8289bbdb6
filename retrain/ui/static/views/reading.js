// What the views of texts and tokens share: the runs of a place, what a run has sampled, a slider over its steps.

import {AddressChoice, RunChoice, button} from "../components/inputs.js";
import {Answered, Empty, Failed} from "../components/states.js";
import {useKeys} from "../keys.js";
import {go, link, useAddress} from "../lib/address.js";
import {useAnswer, useRuns} from "../lib/answer.js";
import {later} from "../lib/browser.js";
import {html, useEffect, useMemo, useRef, useState} from "../lib/html.js";

const PAGE = 100;

// Return the run, split and iterations that the address names. A run that has sampled nothing as that split leads to a
// split that it has. `ready` says whether there is something to ask for.
export function useSampled() {
  const {place, query, patch} = useAddress();
  const {runs, family, known, error, retry} = useRuns(place);
  const run = query.run || (runs.length && !runs.some((each) => each.place === place) ? runs[0].place : place);
  const split = query.split || "train";
  const answer = useAnswer("iterations", known ? {at: run} : null, {kinds: ["metrics", "evals"], wait: 3000});
  const listed = answer.isCurrent;
  const every = answer.data ? answer.data.iterations : [];
  const iterations = every.filter((each) => each.split === split);
  const other = listed && every.length && !iterations.length ? every[0].split : null;
  useEffect(() => {
    if (other !== null) patch({split: other, iteration: null, index: null}, {replace: true});
  }, [other]);
  return {
    ...{runs, family, run, split, iterations},
    splits: [...new Set(every.map((each) => each.split))],
    ready: listed && iterations.length > 0,
    empty: listed && !every.length,
    error: error || answer.error,
    retry: error ? retry : answer.retry,
  };
}

// Shows an answer about what was sampled: what `children()` returns, or why there is none.
export function SampledAnswer({sampled: {error, retry, empty}, of, children}) {
  if (error) return html`<${Failed} error=${error} retry=${retry} />`;
  if (empty)
    return html`<${Empty} title="Nothing has been sampled yet">Rollouts appear here with the first step.<//>`;
  return html`<${Answered} of=${of}>${children}<//>`;
}

// The choices of run, split and step, of which h and l choose another; another run changes `resets` too.
export function SampledTools({sampled: {runs, run, splits}, steps, about, resets, children}) {
  const {patch} = useAddress();
  const step = (iteration) => patch({iteration, first: null, pos: null}, {replace: true});
  const none = {iteration: null, index: null, first: null, group: null, problem: null, pos: null};
  return html`<div class="tools">
    <${RunChoice} runs=${runs} run=${run} resets=${resets} />
    <${SplitChoice} splits=${splits} usual="train" resets=${none} />
    <${Steps} label="step" steps=${steps} step=${about ? about.iteration : null} onStep=${step} hasKeys=${true} />
    ${children}
  </div>`;
}

export function SplitChoice({splits, usual, resets}) {
  const options = splits.map((each) => [each, splitName(each)]);
  return splits.length > 1 && html`<${AddressChoice} name="split" label="split" ...${{options, usual, resets}} />`;
}

/** Return the run to set beside another: the same seed of another condition, else itself. */
export function partner(runs, place) {
  const own = runs.find((run) => run.place === place);
  const others = runs.filter((run) => own && run.label !== own.label);
  const twin = others.find((run) => own && run.seed === own.seed) || others[0];
  return twin ? twin.place : place;
}

// A link to the same prompt under another condition, else at another step; nothing where there is neither.
export function PromptLink({sampled: {family, run}, about: {split, iteration}, problem, sample}) {
  const {place} = useAddress();
  const several = new Set(family.map((each) => each.label)).size > 1;
  const b = several ? partner(family, run) : run;
  const sides = {a: run, b, step_a: several ? iteration : null, step_b: iteration};
  const href = link("prompt", place, {...sides, split, problem, sample: Math.max(0, sample) || null});
  return (several || split !== "train") && html`<a class="small" href=${href}>Same prompt</a>`;
}

// A slider over the steps that there are; `onStep` is called once it rests for a moment. With `hasKeys` h and l go to
// the step before and behind.
export function Steps({label, steps, step, onStep, hasKeys = false}) {
  const [moved, setMoved] = useState(/** @type {number | null} */ (null));
  const newest = useRef(onStep);
  newest.current = onStep;
  const send = useMemo(() => later((to) => newest.current(to), 70), []);
  useEffect(() => send.stop, []);
  useEffect(() => setMoved(null), [step]);
  const before = steps.findLastIndex((each) => step !== null && each <= step);
  const at = moved ?? Math.max(0, before);
  const move = (by) => () => {
    const to = steps[(moved ?? before) + by];
    if (step !== null && to !== undefined) onStep(to);
  };
  useKeys(hasKeys ? {h: [`${label} back`, move(-1)], l: [`${label} forward`, move(1)]} : null);
  const text = `step ${steps[at] ?? "–"}`;
  const slide = (event) => {
    const to = Number(event.target.value);
    setMoved(to);
    send(steps[to]);
  };
  const range = {min: "0", max: Math.max(0, steps.length - 1), value: at, disabled: steps.length < 2};
  const spoken = {"aria-label": label, "aria-valuetext": `${text}, ${at + 1} of ${steps.length}`};
  return html`<span class="steps">
    <input type="range" ...${range} ...${spoken} onInput=${slide} /><output class="stepno">${text}</output>
  </span>`;
}

// Return of these lines the one whose value at a step lies next to y.
export function nearestLine(lines, step, y) {
  const far = (line) => {
    const value = line.y[line.x.indexOf(step)] ?? Infinity;
    return Math.abs(value - y);
  };
  return lines.reduce((best, line) => (far(line) < far(best) ? line : best));
}

// Return what a click on a chart over steps does: it opens the rollouts behind the line next to the click, of the run
// or of the first run of the condition. Null for charts over anything else than steps.
export function openRollouts({metric, x, lines, runs}) {
  if (x !== "step" || !lines || !runs.length) return null;
  const [first, set] = metric.split("/");
  const split = first === "eval" && set ? `eval/${set}` : null;
  return (step, y) => {
    const {index, name} = nearestLine(lines, step, y);
    const own = runs.filter((run) => run.index === index);
    const run = own.find((each) => name.endsWith(` ${each.seed}`)) || own[0] || runs[0];
    go(link("rollouts", run.place, {split, iteration: step}));
  };
}

/** Return the value that lies `by` further in a list; null at an end. */
export function beside(list, value, by) {
  return list[list.indexOf(value) + by] ?? null;
}

/** Return the value that lies `by` further in a list, round and round. */
export function cycled(list, value, by) {
  return list[(list.indexOf(value) + by + list.length) % list.length];
}

// Return the first row of the page in sight, and what leads a page back or on, as far as there are rows.
export function usePages() {
  const {query, patch} = useAddress();
  const first = Math.max(0, Number(query.first) || 0);
  const turn = (by, total) => {
    const to = first + by * PAGE;
    if (to > -PAGE && (by < 0 || to < total)) patch({first: Math.max(0, to) || null});
  };
  return {first, count: PAGE, turn};
}

export function Pager({pages: {first, count, turn}, shown, total}) {
  if (total <= count && first === 0) return null;
  return html`<div class="tools">
    ${button("← previous", () => turn(-1, total), {disabled: first === 0})}
    <span class="small">${shown ? first + 1 : 0} to ${first + shown} of ${total}</span>
    ${button("next →", () => turn(1, total), {disabled: first + count >= total})}
  </div>`;
}

// A list, and beside it what is chosen of it. A chosen one that cannot be shown yet has its place (`isOpen`).
export function Panes({label, chosen, isOpen = Boolean(chosen), children}) {
  return html`<div class=${`panes ${isOpen ? "opened" : ""}`}>
    <section class="list" aria-label=${label}>${children}</section>
    <aside class="beside" aria-label=${`the chosen ${label.slice(0, -1)}`}>${chosen}</aside>
  </div>`;
}

// Shorten a name in its middle: its end tells names apart more often than its beginning.
export function shortName(name, most) {
  const text = String(name);
  const head = Math.floor(most / 3);
  return text.length <= most ? text : `${text.slice(0, head)}…${text.slice(head + 1 - most)}`;
}

export function splitName(split) {
  return split.startsWith("eval/") ? `held out: ${split.slice(5)}` : split;
}

export function Chips({tags}) {
  return (tags || []).map((tag) => html` <span class="chip" key=${tag}>${tag}</span>`);
}
