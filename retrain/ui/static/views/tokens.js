// Tokens: one rollout, every token coloured by one of its numbers, all numbers of one token, and their profile.

import {Title} from "../components/states.js";
import {NUMBERS, scaleOf, valueText} from "../components/token_scales.js";
import {extent, number, plural} from "../format.js";
import {useKeys} from "../keys.js";
import {link, useAddress} from "../lib/address.js";
import {useAnswer} from "../lib/answer.js";
import {later} from "../lib/browser.js";
import {html, useEffect, useMemo, useRef, useState} from "../lib/html.js";
import {Outcome, PromptBox, Strip} from "./conversation.js";
import {Chips, PromptLink, SampledAnswer, SampledTools, beside, cycled, splitName, useSampled} from "./reading.js";
import {ColourChoice, SpokenToken, TokenArea, TokenFacts, startsOf} from "./token_text.js";

// Return the steps whose tokens are recorded, and the one in sight.
function stepsOf({iterations}, about) {
  const recorded = iterations.filter((each) => each.recorded).map((each) => each.iteration);
  return [...new Set([...recorded, ...(about ? [about.iteration] : [])])].sort((a, b) => a - b);
}

// Return what tokens are coloured by: as the address says, else by credit where it changed something.
function colourOf(chosen, numbers) {
  if (chosen in numbers) return chosen;
  if (chosen === "none") return null;
  return numbers.credit && numbers.credit.some((value) => value) ? "credit" : Object.keys(numbers)[0] || null;
}

export function Tokens() {
  const {query, patch} = useAddress();
  const sampled = useSampled();
  const {run, split, ready} = sampled;
  const index = Number(query.index) || 0;
  const question = {at: run, split, iteration: query.iteration, index};
  const answer = useAnswer("rollout", ready ? question : null);
  const {data} = answer;
  const numbers = data && data.pieces ? data.numbers : {};
  const colour = colourOf(query.colour, numbers);
  const steps = stepsOf(sampled, data && data.about);
  useKeys(keysOf({data, index, names: Object.keys(numbers), colour, patch}));
  const rollout = {data, numbers, colour, steps: stepsOf(sampled, null)};
  const pick = (to) => patch({index: to, pos: null});
  const group = () => {
    const {about, siblings, prompt} = data;
    const sample = siblings.findIndex((each) => each.index === index);
    const home = link("rollouts", run, {split: query.split, iteration: about.iteration, index});
    return html`<span class="muted small">group</span>
      <${Strip} samples=${siblings} chosen=${index} onPick=${pick} label="samples of the group" />
      <a class="small" href=${home}>in Rollouts</a>
      <${PromptLink} ...${{sampled, about, problem: prompt.problem_id, sample}} />`;
  };
  return html`<${Title} title="Tokens" words=${data && titleOf(data, index)} />
    <${SampledTools} ...${{sampled, steps, about: data && data.about}} resets=${{pos: null}}>${data && group()}<//>
    <${SampledAnswer} sampled=${sampled} of=${answer}>${() => html`<${Rollout} ...${rollout} />`}<//>`;
}

function keysOf({data, index, names, colour, patch}) {
  const siblings = data ? data.siblings.map((each) => each.index) : [];
  const go = (to) => to !== null && patch({index: to, pos: null});
  const group = (by) => () => {
    if (!data) return;
    const to = by > 0 ? Math.max(...siblings) + 1 : Math.min(...siblings) - 1;
    if (to >= 0 && to < (data.about.rollouts ?? Infinity)) go(to);
  };
  const cycle = (by) => () =>
    names.length && patch({colour: cycled([null, ...names], colour, by) || "none"}, {replace: true});
  return /** @type {import("../keys.js").KeyMap} */ ({
    j: ["next sample of the group", () => go(beside(siblings, index, 1))],
    k: ["previous sample", () => go(beside(siblings, index, -1))],
    g: ["next group", group(1)],
    G: ["previous group", group(-1)],
    c: ["next colour", cycle(1)],
    C: ["previous colour", cycle(-1)],
  });
}

function titleOf({prompt, line, pieces, about}, index) {
  const many = (pieces || []).flat().length;
  const where = [splitName(about.split), `step ${about.iteration}`, prompt.problem_id];
  const parts = [...where, `sample ${line.sample ?? index}`, many ? plural(many, "token") : null];
  return html`${parts.filter((each) => (each ?? null) !== null).join(" · ")}<${Chips} tags=${prompt.tags} />`;
}

// Return the chosen token and how to choose one. The address follows a moment later, and then names the step too, as
// the newest one moves on while a run trains.
function useChosen(data) {
  const {query, patch} = useAddress();
  const there = query.pos === undefined ? null : Number(query.pos);
  const [chosen, setChosen] = useState({at: there, scroll: true});
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
  return /** @type {const} */ ([chosen, choose]);
}

const LABEL = "the rollout's text; arrow keys move from token to token";

function Rollout({data, numbers, colour, steps}) {
  const {patch} = useAddress();
  const {line, pieces, prompt} = data;
  const [chosen, choose] = useChosen(data);
  const [pointed, setPointed] = useState(/** @type {number | null} */ (null));
  const values = colour ? numbers[colour] : null;
  const scale = useMemo(() => (colour ? scaleOf(colour, values) : null), [colour, values]);
  const starts = useMemo(() => startsOf(pieces || []), [pieces]);
  const at = pointed ?? chosen.at;
  const known = at !== null && pieces && at < pieces.flat().length ? at : null;
  const paint = (name) => patch({colour: name}, {replace: true});
  const colours = {names: Object.keys(numbers), value: colour || "none", scale, onChoose: paint};
  const along = {name: colour, values, starts, chosen: chosen.at, pointed};
  const area = {line, pieces, values, scale, chosen, label: LABEL};
  const facts = {numbers, pieces, at: known, name: colour};
  const paints = () => html`<div class="tools paints sticky">
    <${ColourChoice} ...${colours} /><${TokenFacts} ...${facts} />
  </div>`;
  return html`<${Outcome} line=${line} />
    ${pieces ? paints() : html`<${Unrecorded} data=${data} steps=${steps} />`}
    ${pieces && values && html`<${Profile} ...${along} onPick=${(i) => choose(i, true)} onPoint=${setPointed} />`}
    <${TokenArea} ...${area} onPick=${choose} onPoint=${setPointed}><${PromptBox} prompt=${prompt} /><//>
    ${pieces && html`<${SpokenToken} numbers=${numbers} pieces=${pieces} at=${chosen.at} />`}`;
}

function Unrecorded({data: {about, line}, steps}) {
  const {linkTo} = useAddress();
  const far = (step) => Math.abs(step - about.iteration);
  const near = steps.length ? steps.reduce((best, step) => (far(step) < far(best) ? step : best)) : null;
  const shortened = line.whole === false ? "; its text may be shortened" : "";
  const other = html`<a href=${linkTo({iteration: near, pos: null})}>Step ${near} has them.</a>`;
  const way = near === null ? "[logging] rollouts_every says at which steps they are." : other;
  return html`<p class="card">The tokens of step ${about.iteration} are not recorded${shortened}. ${way}</p>`;
}

const WIDE = 1000;
const TALL = 100;
const MOST = 1000;

// Of many tokens, each place of the line shows the least and the greatest.
function linePath(values, x, y) {
  const bin = Math.max(1, Math.ceil(values.length / MOST));
  let path = "";
  let isDown = false;
  for (let i = 0; i < values.length; i += bin) {
    const ends = extent(values.slice(i, i + bin));
    if (ends) {
      path += `${isDown ? "L" : "M"}${x(i)} ${y(ends[0])}`;
      if (ends[1] !== ends[0]) path += `L${x(i)} ${y(ends[1])}`;
      else if (!isDown) path += "h.01";
    }
    isDown = ends !== null;
  }
  return path;
}

function profileOf(name, values) {
  const {kind} = NUMBERS[name];
  const [low, high] = extent(values) || [0, 1];
  const bottom = kind === "range" || kind === "which" ? low : Math.min(0, low);
  const top = Math.max(kind === "flag" ? 1 : 0, high);
  const x = (i) => (((i + 0.5) / values.length) * WIDE).toFixed(1);
  const y = (value) => (TALL - 3 - ((value - bottom) / (top - bottom || 1)) * (TALL - 6)).toFixed(1);
  const ends = `from ${valueText(name, low)} to ${valueText(name, high)}, highest at token ${values.indexOf(high)}`;
  return {bottom, top, ends, path: linePath(values, x, y), zero: bottom < 0 && top > 0 ? y(0) : null, x};
}

function Profile({name, values, starts, chosen, pointed, onPick, onPoint}) {
  const {bottom, top, ends, path, zero, x} = useMemo(() => profileOf(name, values), [name, values]);
  const many = values.length;
  const token = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    return Math.max(0, Math.min(many - 1, Math.floor(((event.clientX - box.left) / box.width) * many)));
  };
  const upright = (at, css = "") => html`<line class=${css} x1=${at} x2=${at} y1="0" y2=${TALL} />`;
  const turns = starts.slice(1).map((first) => upright(((first / many) * WIDE).toFixed(1)));
  const {title} = NUMBERS[name];
  const picture = {viewBox: `0 0 ${WIDE} ${TALL}`, preserveAspectRatio: "none", role: "img"};
  const events = {
    onClick: (event) => onPick(token(event)),
    onPointerMove: (event) => onPoint(token(event)),
    onPointerLeave: () => onPoint(null),
  };
  return html`<figure class="profile">
    <figcaption>
      <b>${title}</b>
      <span class="muted"> along the ${many} tokens${starts.length > 1 ? `, ${starts.length} turns` : ""}</span>
    </figcaption>
    <div class="frame">
      <span class="tick top">${number(top)}</span><span class="tick">${number(bottom)}</span>
      <svg ...${picture} aria-label=${`${title} over ${many} tokens, ${ends}`} ...${events}>
        ${zero !== null && html`<line class="zero" x1="0" x2=${WIDE} y1=${zero} y2=${zero} />`}${turns}
        <path class="along" d=${path} />
        ${pointed !== null && upright(x(pointed))}${chosen !== null && upright(x(chosen), "cursor")}
      </svg>
    </div>
    <div class="ends"><span>0</span><span>${many - 1}</span></div>
  </figure>`;
}
