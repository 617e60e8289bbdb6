// Tokens: one rollout, every token coloured by one of its numbers, all numbers of one token, and their profile.

import {plural} from "../format.js";
import {useKeys} from "../keys.js";
import {useAddress} from "../lib/address.js";
import {later} from "../lib/browser.js";
import {html, useEffect, useMemo, useRef, useState} from "../lib/html.js";
import {link} from "../router.js";
import {Outcome, PromptBox, Strip} from "./conversation.js";
import {Profile} from "./profile.js";
import {Chips, RunChoice, SplitChoice, Steps, promptLink, splitName, stepBeside, useSampled} from "./reading.js";
import {SampledAnswer, useIterationAnswer} from "./reading.js";
import {ColourChoice, Legend, NUMBERS, cleaned, present, scaleOf} from "./token_numbers.js";
import {SpokenToken, TokenArea, TokenFacts, startsOf} from "./token_text.js";

/** @typedef {import("./token_text.js").Chosen} Chosen */

/** Return the steps whose tokens are recorded, and the one in sight. @param {any} sampled */
function stepsOf({iterations}, about) {
  const recorded = iterations.filter((each) => each.recorded).map((each) => each.iteration);
  if (!about || recorded.includes(about.iteration)) return recorded;
  return [...recorded, about.iteration].sort((a, b) => a - b);
}

/** What tokens are coloured by: as the address says, else by credit where it changed something. */
function colourOf(chosen, names, numbers) {
  if (names.includes(chosen)) return chosen;
  if (chosen === "none") return null;
  return names.includes("credit") && numbers.credit.some((value) => value) ? "credit" : names[0] || null;
}

export function Tokens() {
  const {query, patch} = useAddress();
  const sampled = useSampled();
  const {run, split, ready} = sampled;
  const index = Number(query.index) || 0;
  const question = ready ? {at: run, split, iteration: query.iteration, index} : null;
  const answer = useIterationAnswer("rollout", question);
  const {data} = answer;
  const numbers = useMemo(() => cleaned((data && data.numbers) || {}), [data]);
  const names = useMemo(() => (data && data.pieces ? present(numbers) : []), [numbers]);
  const colour = colourOf(query.colour, names, numbers);
  useKeys(keysOf({data, steps: stepsOf(sampled, data && data.about), index, names, colour, patch}));
  const rollout = {data, numbers, names, colour, steps: stepsOf(sampled, null)};
  return html`<${Title} data=${data} index=${index} />
    <${Tools} sampled=${sampled} data=${data} index=${index} />
    <${SampledAnswer} sampled=${sampled} of=${answer}>${() => html`<${Rollout} ...${rollout} />`}<//>`;
}

function keysOf({data, steps, index, names, colour, patch}) {
  const siblings = data ? data.siblings.map((each) => each.index) : [];
  const go = (to) => patch({index: to, pos: null});
  const sibling = (by) => () => {
    const to = siblings[siblings.indexOf(index) + by];
    if (to !== undefined) go(to);
  };
  const group = (by) => () => {
    if (!data) return;
    const to = by > 0 ? Math.max(...siblings) + 1 : Math.min(...siblings) - 1;
    if (to >= 0 && to < (data.about.rollouts ?? Infinity)) go(to);
  };
  const step = (by) => () => {
    const to = data ? stepBeside(steps, data.about.iteration, by) : null;
    if (to !== null) patch({iteration: to, pos: null});
  };
  const cycle = (by) => () => {
    const all = [null, ...names];
    const to = all[(all.indexOf(colour) + by + all.length) % all.length];
    if (names.length) patch({colour: to || "none"}, {replace: true});
  };
  return /** @type {import("../keys.js").KeyMap} */ ({
    j: ["next sample of the group", sibling(1)],
    k: ["previous sample", sibling(-1)],
    h: ["step back", step(-1)],
    l: ["step forward", step(1)],
    g: ["next group", group(1)],
    G: ["previous group", group(-1)],
    c: ["next colour", cycle(1)],
    C: ["previous colour", cycle(-1)],
  });
}

/** @param {{data: any, index: number}} props */
function Title({data, index}) {
  if (!data) return html`<div class="title"><h1>Tokens</h1><p class="muted" /></div>`;
  const {prompt, line, pieces, about} = data;
  const many = (pieces || []).reduce((sum, turn) => sum + turn.length, 0);
  const parts = [
    splitName(about.split),
    `step ${about.iteration}`,
    prompt.problem_id,
    `sample ${line.sample ?? index}`,
  ];
  if (many) parts.push(plural(many, "token"));
  return html`<div class="title">
    <h1>Tokens</h1>
    <p class="muted">
      ${parts.filter((each) => each !== null && each !== undefined).join(" · ")}<${Chips} tags=${prompt.tags} />
    </p>
  </div>`;
}

/** @param {{sampled: any, data: any, index: number}} props */
function Tools({sampled, data, index}) {
  const {place, query, patch} = useAddress();
  const {runs, family, run, split, splits} = sampled;
  const about = data && data.about;
  const sample = data ? data.siblings.findIndex((each) => each.index === index) : 0;
  const problem = data && data.prompt.problem_id;
  const twin = data && promptLink({family, place, run, about, problem, sample: Math.max(0, sample)});
  const step = (iteration) => patch({iteration, pos: null}, {replace: true});
  const pick = (to) => patch({index: to, pos: null});
  const home = data && link("rollouts", run, {split: query.split, iteration: about.iteration, index});
  const choose = (value) => patch({run: value, pos: null});
  const other = (value) => patch({split: value, iteration: null, index: null, pos: null});
  const steps = stepsOf(sampled, about);
  return html`<div class="tools">
    ${runs.length > 1 && html`<${RunChoice} label="run" runs=${runs} value=${run} onChoose=${choose} />`}
    <${SplitChoice} splits=${splits} value=${split} onChoose=${other} />
    <${Steps} label="step" steps=${steps} step=${about ? about.iteration : null} onStep=${step} />
    ${
      data &&
      html`<span class="muted small">group</span>
        <${Strip} samples=${data.siblings} chosen=${index} onPick=${pick} label="samples of the group" />
        <a class="small" href=${home}>in Rollouts</a>`
    }
    ${twin && html`<a class="small" href=${twin}>Same prompt</a>`}
  </div>`;
}

/**
 * Return the chosen token and how to choose one. The address follows a moment later, and then names the step too, as
 * the newest one moves on while a run trains.
 */
function useChosen(data) {
  const {query, patch} = useAddress();
  const there = query.pos === undefined ? null : Number(query.pos);
  const [chosen, setChosen] = useState(/** @type {Chosen} */ ({at: there, scroll: true}));
  const newest = useRef(/** @type {(at: number) => void} */ (() => {}));
  newest.current = (at) => patch({iteration: data.about.iteration, pos: at}, {replace: true});
  const send = useMemo(() => later((at) => newest.current(at), 250), []);
  useEffect(() => {
    setChosen((old) => (old.at === there ? old : {at: there, scroll: false}));
    return send.stop;
  }, [there, data]);
  const choose = (at, scroll) => {
    setChosen({at, scroll});
    send(at);
  };
  return /** @type {[Chosen, (at: number, scroll: boolean) => void]} */ ([chosen, choose]);
}

/** @param {{data: any, numbers: any, names: string[], colour: string | null, steps: number[]}} props */
function Rollout({data, numbers, names, colour, steps}) {
  const {patch} = useAddress();
  const {line, pieces, prompt} = data;
  const [chosen, choose] = useChosen(data);
  const [pointed, setPointed] = useState(/** @type {number | null} */ (null));
  const values = colour ? numbers[colour] : null;
  const scale = useMemo(() => (colour ? scaleOf(colour, values) : null), [colour, values]);
  const starts = useMemo(() => startsOf(pieces || []), [pieces]);
  const at = pointed ?? chosen.at;
  const total = pieces ? pieces.flat().length : 0;
  const known = at !== null && at < total ? at : null;
  const options = [["none", "plain"], ...names.map((name) => [name, NUMBERS[name].title])];
  const paint = (name) => patch({colour: name}, {replace: true});
  const label = "the rollout's text; arrow keys move from token to token";
  const paints = html`<div class="tools paints sticky">
    <${ColourChoice} options=${options} value=${colour || "none"} onChoose=${paint} />
    ${scale && html`<${Legend} name=${colour} scale=${scale} />`}
    <${TokenFacts} numbers=${numbers} pieces=${pieces} at=${known} name=${colour} />
  </div>`;
  const along = {name: colour, values, starts, chosen: chosen.at, pointed};
  return html`<${Outcome} line=${line} />
    ${!pieces && html`<${Unrecorded} data=${data} steps=${steps} />`}${pieces && paints}
    ${pieces && values && html`<${Profile} ...${along} onPick=${(i) => choose(i, true)} onPoint=${setPointed} />`}
    <${TokenArea}
      ...${{label, line, pieces, values, scale, chosen}}
      onPick=${choose}
      onPoint=${setPointed}
    >
      <${PromptBox} prompt=${prompt} />
    <//>
    ${pieces && html`<${SpokenToken} numbers=${numbers} pieces=${pieces} at=${chosen.at} />`}`;
}

/** @param {{data: any, steps: number[]}} props */
function Unrecorded({data: {about, line}, steps}) {
  const {linkTo} = useAddress();
  const far = (step) => Math.abs(step - about.iteration);
  const near = steps.length ? steps.reduce((best, step) => (far(step) < far(best) ? step : best)) : null;
  const shortened = line.whole === false ? "; its text may be shortened" : "";
  const way =
    near === null
      ? "[logging] rollouts_every says at which steps they are."
      : html`<a href=${linkTo({iteration: near, pos: null})}>Step ${near} has them.</a>`;
  return html`<p class="card">The tokens of step ${about.iteration} are not recorded${shortened}. ${way}</p>`;
}
