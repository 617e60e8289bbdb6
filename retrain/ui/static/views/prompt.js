// Same prompt: the answers of two runs, or of one run at two steps, side by side, and where they part.

import {Choice, Field} from "../components/inputs.js";
import {Empty, Failed, Loading} from "../components/states.js";
import {number, plural, shortened} from "../format.js";
import {useKeys} from "../keys.js";
import {useAddress} from "../lib/address.js";
import {useAnswer} from "../lib/answer.js";
import {useRuns} from "../lib/campaign.js";
import {html, useMemo, visible} from "../lib/html.js";
import {link} from "../router.js";
import {PromptBox} from "./conversation.js";
import {Side, SideAnswer} from "./prompt_side.js";
import {Chips, SplitChoice, partner, splitName, stepBeside} from "./reading.js";
import {ColourChoice, Legend, NUMBERS, cleaned, present, scaleOf} from "./token_numbers.js";

const MOST_PROBLEMS = 500;
const MOST_SAMPLES = 200;

/** @typedef {"a" | "b"} SideName */
/** @type {SideName[]} */
const SIDES = ["a", "b"];

/**
 * Return both runs, the split, and of each side its steps and the one in sight: the chosen one, else the newest that
 * is recorded; of A beside the same run the first.
 */
function useSides() {
  const {place, query} = useAddress();
  const {home, family, known, error, retry} = useRuns(place);
  const isRun = !family.length || family.some((run) => run.place === place);
  const first = query.a || (isRun ? place : family[0].place);
  const run = {a: first, b: query.b || (first === place ? first : partner(family, first))};
  const kinds = {kinds: ["evals"], wait: 3000};
  const lists = {
    a: useAnswer("iterations", known ? {at: run.a} : null, kinds),
    b: useAnswer("iterations", known ? {at: run.b} : null, kinds),
  };
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
  return {
    ...{home, runs: family, run, splits, split},
    steps: {a: steps("a"), b: steps("b")},
    step: {a: stepOf("a"), b: stepOf("b")},
    listed: SIDES.every((side) => lists[side].isCurrent),
    empty: !all.length,
    error: error || lists.a.error || lists.b.error,
    retry: error ? retry : lists.a.error ? lists.a.retry : lists.b.retry,
  };
}

/** Return the problems of the split: held-out ones in the order of Problems, else those of A's step. */
function useProblems({home, split, run, step, ready}, order) {
  const isHeldOut = split.startsWith("eval/");
  const held = {at: home, set: split.slice(5), sort: order || "problem", count: MOST_PROBLEMS};
  const found = useAnswer("problems", ready && isHeldOut ? held : null);
  const trained = {at: run.a, split, iteration: step.a, count: 1};
  const groups = useAnswer("rollouts", ready && !isHeldOut ? trained : null);
  const ids = isHeldOut
    ? ((found.data && found.data.problems) || []).map((each) => each.id)
    : ((groups.data && groups.data.groups) || []).map((each) => each.problem_id);
  return [...new Set(ids)];
}

export function Prompt() {
  const {query, patch} = useAddress();
  const sides = useSides();
  const {run, split, steps, step, listed} = sides;
  const ready = listed && steps.a.length > 0 && steps.b.length > 0;
  const sample = Number(query.sample) || 0;
  const both = {a: run.a, b: run.b, split, step_a: step.a, step_b: step.b};
  const answer = useAnswer("prompt", ready ? {...both, problem: query.problem, sample} : null);
  const failure = sides.error || (answer.isCurrent ? null : answer.error);
  const data = useMemo(() => answer.data && {...answer.data, ...cleanedSides(answer.data)}, [answer.data]);
  const problems = useProblems({...sides, ready}, query.order);
  const problem = query.problem || (data && data.problem);
  const names = data ? present(data.a.numbers).filter((name) => present(data.b.numbers).includes(name)) : [];
  const how = query.colour === "plain" || names.includes(query.colour) ? query.colour : "words";
  const samples = data ? Math.min(data.a.samples, data.b.samples) : 1;
  const state = {problems, problem, sample, samples, names, how};
  useKeys(keysOf({...state, ...sides, patch}));
  const isShown = data && !failure && ready;
  let content = html`<${Loading} />`;
  if (failure) content = html`<${Failed} error=${failure} retry=${sides.error ? sides.retry : answer.retry} />`;
  else if (listed && !ready) content = html`<${NoSteps} empty=${sides.empty} split=${split} />`;
  else if (isShown) content = html`<${Above} data=${data} names=${names} how=${how} />`;
  const values = isShown && names.includes(how) ? [data.a.numbers[how], data.b.numbers[how]] : null;
  const side = (name) => {
    const inside = isShown && html`<${SideAnswer} ...${{data, side: name, run: run[name], how, both: values}} />`;
    const head = {side: name, runs: sides.runs, run: run[name], steps: steps[name], step: step[name]};
    return html`<${Side} key=${name} ...${head} patch=${patch}>${inside}<//>`;
  };
  return html`<${Title} data=${data} />
    <${Tools} sides=${sides} ...${state} />
    ${content}
    ${listed && html`<div class="sides">${SIDES.map(side)}</div>`}`;
}

function cleanedSides(data) {
  const side = (name) => ({...data[name], numbers: cleaned(data[name].numbers || {})});
  return {a: side("a"), b: side("b")};
}

function keysOf({problems, problem, sample, samples, names, how, steps, step, patch}) {
  const other = (by) => () => {
    const to = problems[problems.indexOf(problem) + by];
    if (to !== undefined) patch({problem: to, sample: null});
  };
  const next = (by) => () => {
    const to = sample + by;
    if (to >= 0 && to < samples) patch({sample: to || null});
    else other(by)();
  };
  const move = (by, names_) => () => {
    const there = names_.map((side) => [`step_${side}`, stepBeside(steps[side], step[side], by)]);
    const changes = Object.fromEntries(there.filter(([, to]) => to !== null));
    if (Object.keys(changes).length) patch({step_a: step.a, step_b: step.b, ...changes}, {replace: true});
  };
  const paint = (name) => patch({colour: name === "words" ? null : name}, {replace: true});
  const cycle = (by) => () => {
    const all = ["words", "plain", ...names];
    paint(all[(all.indexOf(how) + by + all.length) % all.length]);
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
    c: ["next colour", cycle(1)],
    C: ["previous colour", cycle(-1)],
    d: ["words that differ, or not", () => paint(how === "words" ? "plain" : "words")],
  });
}

/** @param {{data: any}} props */
function Title({data}) {
  const words = data ? [splitName(data.split), shortened(String(data.problem), 90)].join(" · ") : "";
  return html`<div class="title">
    <h1>Same prompt</h1>
    <p class="muted">${words}<${Chips} tags=${data && data.a.prompt.tags} /></p>
  </div>`;
}

/** @param {{empty: boolean, split: string}} props */
function NoSteps({empty, split}) {
  if (empty) {
    return html`<${Empty} title="Nothing has been sampled yet">Answers appear here with the first evaluation.<//>`;
  }
  const title = `One of the two has sampled nothing as ${splitName(split)}`;
  return html`<${Empty} title=${title}>Choose another run or split.<//>`;
}

/** @param {{sides: any, problems: string[], problem: any, sample: number, samples: number}} props */
function Tools({sides, problems, problem, sample, samples}) {
  const {query, patch} = useAddress();
  const {home, run, split, splits, step} = sides;
  const at = problems.indexOf(problem);
  const go = (to) => patch({problem: to, sample: null});
  const other = (value) => patch({split: value, problem: null, sample: null, step_a: null, step_b: null});
  const swap = () => patch({a: run.b, b: run.a, step_a: step.b, step_b: step.a});
  const options = Array.from({length: Math.min(samples, MOST_SAMPLES)}, (_, i) => [String(i), `sample ${i}`]);
  const pick = (value) => patch({sample: value === "0" ? null : value});
  const step_ = (by, text, label) => {
    const to = problems[at + by];
    const isEnd = to === undefined;
    return html`<button type="button" aria-label=${label} disabled=${isEnd} onClick=${() => go(to)}>${text}</button>`;
  };
  const count = at >= 0 ? `${at + 1} of ${problems.length}` : plural(problems.length, "problem");
  const field = {label: "problem", class: "place problem", placeholder: "a problem …"};
  const set = {set: split.slice(5), id: problem, sort: query.order};
  return html`<div class="tools">
    <${SplitChoice} splits=${splits} value=${split} onChoose=${other} />
    <span class="segments">${step_(-1, "‹", "previous problem")}${step_(1, "›", "next problem")}</span>
    <${Field} ...${field} value=${visible(problem || "")} options=${problems} onEnter=${(id) => go(id || null)} />
    ${problems.length > 0 && html`<span class="small muted">${count}</span>`}
    ${samples > 1 && html`<${Choice} label="sample" options=${options} value=${String(sample)} onChoose=${pick} />`}
    <button type="button" title="A and B change places" onClick=${swap}>swap</button>
    ${split.startsWith("eval/") && home && html`<a class="small" href=${link("problems", home, set)}>in Problems</a>`}
  </div>`;
}

/** Return in words how far two answers agree, and with what each goes on. */
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
  const before = (side) => side.pieces.slice(0, turn).reduce((sum, each) => sum + each.length, 0);
  const then = (side) => {
    const piece = side.pieces[turn][token];
    if (piece === undefined) return "ends";
    const {surprisal} = side.numbers;
    const nats = surprisal ? ` (surprisal ${number(surprisal[before(side) + token])} nats)` : "";
    return `goes on with ${JSON.stringify(shortened(piece, 40))}${nats}`;
  };
  const same = before(a) + token;
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

/** What stands above both sides. @param {{data: any, names: string[], how: string}} props */
function Above({data, names, how}) {
  const {patch} = useAddress();
  const isNumber = names.includes(how);
  const values = isNumber ? [...data.a.numbers[how], ...data.b.numbers[how]] : [];
  const options = [
    ["words", "words that differ"],
    ["plain", "plain"],
    ...names.map((name) => [name, NUMBERS[name].title]),
  ];
  const paint = (name) => patch({colour: name === "words" ? null : name}, {replace: true});
  const asking = data.a.prompt.messages.length ? data.a.prompt : data.b.prompt;
  return html`<${PromptBox} prompt=${asking} />
    <div class="tools paints">
      <${ColourChoice} options=${options} value=${how} onChoose=${paint} />
      ${isNumber ? html`<${Legend} name=${how} scale=${scaleOf(how, values)} />` : how === "words" && WORDS_LEGEND}
    </div>
    <p class="parting" role="status">${parting(data)}</p>`;
}
