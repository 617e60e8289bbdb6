// Same prompt: the answers of two runs, or of one run at two steps, side by side, and where they part.

import {Choice, Field, RunChoice, button} from "../components/inputs.js";
import {Swatch} from "../components/marks.js";
import {Empty, Failed, Loading, Title} from "../components/states.js";
import {number, plural, shortened} from "../format.js";
import {useKeys} from "../keys.js";
import {link, useAddress} from "../lib/address.js";
import {useAnswer, useRuns} from "../lib/answer.js";
import {html, visible} from "../lib/html.js";
import {EMPTY_TEXT, Outcome, PromptBox, Turns} from "./conversation.js";
import {Chips, SplitChoice, Steps, beside, partner, splitName} from "./reading.js";

const MOST_PROBLEMS = 500;
const MOST_SAMPLES = 200;
const SIDES = /** @type {const} */ (["a", "b"]);

// Return both runs, the split, and of each side its steps and the one in sight: the chosen one, else the newest that is
// recorded; of A beside the same run the first.
function useSides() {
  const {place, query} = useAddress();
  const {home, family, known, error, retry} = useRuns(place);
  const isRun = !family.length || family.some((run) => run.place === place);
  const first = query.a || (isRun ? place : family[0].place);
  const run = {a: first, b: query.b || (first === place ? first : partner(family, first))};
  const useIterations = (at) => useAnswer("iterations", known ? {at} : null, {kinds: ["evals"], wait: 3000});
  const lists = {a: useIterations(run.a), b: useIterations(run.b)};
  const every = (side) => (lists[side].data ? lists[side].data.iterations : []);
  const all = [...new Set([...every("a"), ...every("b")].map((each) => each.split))];
  const splits = all.sort((x, y) => Number(x === "train") - Number(y === "train"));
  const split = query.split || splits[0] || "eval/heldout";
  const iterations = (side) => every(side).filter((each) => each.split === split);
  const stepOf = (side) => {
    const chosen = query[`step_${side}`];
    if (chosen !== undefined) return Number(chosen);
    const recorded = iterations(side).filter((each) => each.recorded);
    const from = recorded.length ? recorded : iterations(side);
    const found = side === "a" && run.a === run.b ? from[0] : from[from.length - 1];
    return found ? found.iteration : null;
  };
  const steps = (side) => iterations(side).map((each) => each.iteration);
  const failed = [{error, retry}, lists.a, lists.b].find((each) => each.error);
  return {
    ...{home, runs: family, run, splits, split, failed},
    steps: {a: steps("a"), b: steps("b")},
    step: {a: stepOf("a"), b: stepOf("b")},
    listed: SIDES.every((side) => lists[side].isCurrent),
  };
}

// Return the problems of the split: held-out ones in the order of Problems, else those of A's step.
function useProblems({home, split, run, step}, ready, order) {
  const isHeldOut = split.startsWith("eval/");
  const held = {at: home, set: split.slice(5), sort: order || "problem", count: MOST_PROBLEMS};
  const found = useAnswer("problems", ready && isHeldOut ? held : null).data;
  const trained = {at: run.a, split, iteration: step.a, count: 1};
  const groups = useAnswer("rollouts", ready && !isHeldOut ? trained : null).data;
  const known = isHeldOut
    ? found && found.problems.map((each) => each.id)
    : groups && groups.groups.map((each) => each.problem_id);
  return [...new Set(known || [])];
}

export function Prompt() {
  const {query, patch} = useAddress();
  const sides = useSides();
  const {run, split, steps, step, listed, failed} = sides;
  const ready = listed && steps.a.length > 0 && steps.b.length > 0;
  const sample = Number(query.sample) || 0;
  const both = {a: run.a, b: run.b, split, step_a: step.a, step_b: step.b};
  const answer = useAnswer("prompt", ready ? {...both, problem: query.problem, sample} : null);
  const {data} = answer;
  const failure = failed || (answer.error && !answer.isCurrent ? answer : null);
  const problems = useProblems(sides, ready, query.order);
  const problem = query.problem || (data && data.problem);
  const samples = data ? Math.min(data.a.samples, data.b.samples) : 1;
  const state = {problems, problem, sample, samples};
  useKeys(keysOf({...state, ...sides, patch}));
  const isShown = data && !failure && ready;
  let content = html`<${Loading} />`;
  if (failure) content = html`<${Failed} error=${failure.error} retry=${failure.retry} />`;
  else if (listed && !ready) content = html`<${NoSteps} splits=${sides.splits} split=${split} />`;
  else if (isShown) content = html`<${Above} data=${data} />`;
  const side = (name) => {
    const inside = isShown && html`<${SideAnswer} data=${data} side=${name} run=${run[name]} />`;
    const head = {side: name, runs: sides.runs, run: run[name], steps: steps[name], step: step[name]};
    return html`<${Side} key=${name} ...${head}>${inside}<//>`;
  };
  const words =
    data &&
    html`${splitName(data.split)} · ${shortened(String(data.problem), 90)}<${Chips} tags=${data.a.prompt.tags} />`;
  return html`<${Title} title="Same prompt" words=${words} /><${Tools} sides=${sides} ...${state} />${content}
    ${listed && html`<div class="sides">${SIDES.map(side)}</div>`}`;
}

function keysOf({problems, problem, sample, samples, steps, step, patch}) {
  const other = (by) => () => {
    const to = beside(problems, problem, by);
    if (to !== null) patch({problem: to, sample: null});
  };
  const next = (by) => () => {
    const to = sample + by;
    if (to >= 0 && to < samples) patch({sample: to || null});
    else other(by)();
  };
  const move = (by, sides) => () => {
    const there = sides.map((side) => [`step_${side}`, beside(steps[side], step[side], by)]);
    const changes = there.filter(([, to]) => to !== null);
    if (changes.length) patch({step_a: step.a, step_b: step.b, ...Object.fromEntries(changes)}, {replace: true});
  };
  return /** @type {import("../keys.js").KeyMap} */ ({
    j: ["next sample, then the next problem", next(1)],
    k: ["previous sample or problem", next(-1)],
    g: ["next problem", other(1)],
    G: ["previous problem", other(-1)],
    h: ["both a step back", move(-1, SIDES)],
    l: ["both a step forward", move(1, SIDES)],
    H: ["B a step back", move(-1, ["b"])],
    L: ["B a step forward", move(1, ["b"])],
  });
}

function NoSteps({splits, split}) {
  const title = `One of the two has sampled nothing as ${splitName(split)}`;
  if (splits.length) return html`<${Empty} title=${title}>Choose another run or split.<//>`;
  return html`<${Empty} title="Nothing has been sampled yet">Answers appear here with the first evaluation.<//>`;
}

function Tools({sides, problems, problem, sample, samples}) {
  const {query, patch} = useAddress();
  const {home, run, split, splits, step} = sides;
  const at = problems.indexOf(problem);
  const go = (to) => patch({problem: to, sample: null});
  const resets = {problem: null, sample: null, step_a: null, step_b: null};
  const swap = () => patch({a: run.b, b: run.a, step_a: step.b, step_b: step.a});
  const options = Array.from({length: Math.min(samples, MOST_SAMPLES)}, (_, i) => [String(i), `sample ${i}`]);
  const pick = (value) => patch({sample: value === "0" ? null : value});
  const move = (by, text, label) => {
    const to = beside(problems, problem, by);
    return button(text, () => go(to), {"aria-label": label, disabled: to === null});
  };
  const count = at >= 0 ? `${at + 1} of ${problems.length}` : plural(problems.length, "problem");
  const field = {label: "problem", class: "place problem", placeholder: "a problem …", options: problems};
  const set = {set: split.slice(5), id: problem, sort: query.order};
  return html`<div class="tools">
    <${SplitChoice} splits=${splits} usual=${splits[0]} resets=${resets} />
    <span class="segments">${move(-1, "‹", "previous problem")}${move(1, "›", "next problem")}</span>
    <${Field} ...${field} value=${visible(problem || "")} onEnter=${(id) => go(id || null)} />
    ${problems.length > 0 && html`<span class="small muted">${count}</span>`}
    <${Choice} label="sample" options=${options} value=${String(sample)} onChoose=${pick} />
    ${button("swap", swap, {title: "A and B change places"})}
    ${split.startsWith("eval/") && home && html`<a class="small" href=${link("problems", home, set)}>in Problems</a>`}
  </div>`;
}

// Return in words how far two answers agree, and with what each goes on.
function parting({a, b, diverge, by}) {
  if (!a.pieces || !b.pieces) {
    const why = "where their tokens part is not known, as the tokens of a step are not recorded.";
    return `Words that only one of the two has are marked; ${why}`;
  }
  if (!diverge) {
    const isSame = JSON.stringify(a.pieces) === JSON.stringify(b.pieces);
    return isSame ? "The same answer, token for token." : "One answer is the beginning of the other.";
  }
  const [turn, token] = diverge;
  const at = (side) => side.pieces.slice(0, turn).flat().length + token;
  const then = (side) => {
    const piece = side.pieces[turn][token];
    if (piece === undefined) return "ends";
    const {surprisal} = side.numbers;
    const nats = surprisal ? ` (surprisal ${number(surprisal[at(side)])} nats)` : "";
    return `goes on with ${JSON.stringify(shortened(piece, 40))}${nats}`;
  };
  const same = at(a);
  const agree = `The first ${plural(same, "token")} ${same === 1 ? "is" : "are"} the same`;
  const lines = by === "lines" ? " Texts as long as these are compared line by line." : "";
  const where = turn ? `, up to turn ${turn + 1}` : "";
  return `${same ? agree : "The first token differs"}${where}; then A ${then(a)}, B ${then(b)}.${lines}`;
}

const WORDS_LEGEND = html`<span class="legendline">
  <span class="side a"><mark class="only">only in A</mark></span>
  <span class="side b"><mark class="only">only in B</mark></span>
  <span class="fork" aria-hidden="true">▶</span>first token that differs
</span>`;

function Above({data}) {
  const asking = data.a.prompt.messages.length ? data.a.prompt : data.b.prompt;
  return html`<${PromptBox} prompt=${asking} />
    <p>${WORDS_LEGEND}</p>
    <p class="parting" role="status">${parting(data)}</p>`;
}

const PARTING = "first token that differs";
const FORK = html`<span class="fork" role="img" aria-label=${PARTING} title=${PARTING}>▶</span>`;

// Return [from, to] of the characters that the other side's text has not. A change has its kind, and from which word to
// which it goes in A and in B.
function ownSpans(words, changes, side) {
  const starts = [0];
  for (const word of words) starts.push(starts[starts.length - 1] + word.length);
  const own = changes.map(([kind, ...ends]) => [kind, ...(side === "a" ? ends.slice(0, 2) : ends.slice(2))]);
  return own.flatMap(([kind, from, to]) => (kind !== "equal" && to > from ? [[starts[from], starts[to]]] : []));
}

// Characters `from` to `to` of the text, those in `spans` marked, and the fork where `at` lies.
function MarkedWords({text, from, to, spans, at}) {
  const cuts = [from, to, ...spans.flat(), ...(at === null ? [] : [at])].filter((cut) => cut >= from && cut <= to);
  const all = [...new Set(cuts)].sort((a, b) => a - b);
  const parts = all.map((cut, i) => {
    const piece = text.slice(cut, all[i + 1] ?? cut);
    const isOwn = piece && spans.some(([a, b]) => a <= cut && cut < b);
    const mark = isOwn && html`<mark class=${/\S/.test(piece) ? "only" : "only blank"}>${piece}</mark>`;
    return html`${cut === at && FORK}${mark || piece}`;
  });
  const isEmpty = from === to && at === null;
  return html`<div class="tokentext" dir="auto">${isEmpty ? EMPTY_TEXT : parts}</div>`;
}

function Side({side, runs, run, steps, step, children}) {
  const {patch} = useAddress();
  const name = side.toUpperCase();
  const found = runs.find((each) => each.place === run);
  const move = (to) => patch({[`step_${side}`]: to}, {replace: true});
  return html`<section class=${`side ${side}`} aria-label=${name}>
    <div class="tools sidehead">
      <b class="letter">${name}</b>${found && html`<${Swatch} index=${found.index} />`}
      <${RunChoice} label=${`run of ${name}`} name=${side} runs=${runs} run=${run} />
      <${Steps} label=${`step of ${name}`} steps=${steps} step=${step} onStep=${move} />
    </div>
    ${children}
  </section>`;
}

// The answer of a side, the words that only it has marked, and the fork where its tokens part from the other's.
function SideAnswer({data, side, run}) {
  const {about, line, pieces, index} = data[side];
  const [forkTurn, token] = data.diverge && pieces ? data.diverge : [];
  const texts = line.turns.map((turn) => turn.text);
  const text = texts.join("\n");
  const spans = ownSpans(data.words[side === "a" ? 0 : 1], data.changes, side);
  const body = (turn, k) => {
    const from = texts.slice(0, k).reduce((sum, each) => sum + each.length + 1, 0);
    const at = k === forkTurn ? from + pieces[k].slice(0, token).join("").length : null;
    return html`<${MarkedWords} ...${{text, from, to: from + turn.text.length, at, spans}} />`;
  };
  const home = link("tokens", run, {split: about.split, iteration: about.iteration, index});
  const unknown = " · the tokens of this step are not recorded, its text may be shortened";
  return html`<${Outcome} line=${line} />
    <p class="small"><a href=${home}>its tokens</a>${!pieces && html`<span class="muted">${unknown}</span>`}</p>
    <div class="conversation" tabindex="0" role="group" aria-label=${`answer ${side.toUpperCase()}`}>
      <${Turns} line=${line} body=${body} />
    </div>`;
}
