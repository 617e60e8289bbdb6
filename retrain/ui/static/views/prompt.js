// @ts-nocheck
// Same prompt: the answers of two runs, or of one run at two steps, side by side, and where they part.

import {get, gone, newest} from "../api.js";
import {button, choice, el, failed, keepingFocus, loading, nothing, put, spaced, visible} from "../dom.js";
import {number, plural, shortened} from "../format.js";
import {campaignOf} from "../places.js";
import {link} from "../router.js";
import {promptOf} from "./conversation.js";
import {Side} from "./prompt_side.js";
import {family, partner, splitName} from "./reading.js";
import {NUMBERS, cleaned, legend, present, scaleOf} from "./token_numbers.js";

const MOST = 500;

export function prompt(root, state, frame) {
  const {patch} = frame;
  let query = state.query, runs = [], home = state.place, answer = null, lists = {a: [], b: []}, problems = [], listed = "", asked = "", drawn = "", stopped = false;
  const next = newest(), title = el("div", {class: "title"}, el("h1", null, "Same prompt"), el("p", {class: "muted"})), tools = el("div", {class: "tools"}), colours = el("div", {class: "tools paints"});
  const said = el("p", {class: "parting", role: "status"}), above = el("div"), wrong = el("div"), sides = {a: new Side("a", patch), b: new Side("b", patch)};
  const names = el("datalist", {id: "problem-names"}), field = el("input", {type: "text", list: "problem-names", class: "place problem", "aria-label": "problem", placeholder: "a problem …", on: {change: () => patch({problem: field.value || null, sample: null})}});
  const body = el("div", null, above, colours, said, wrong, el("div", {class: "sides"}, sides.a.root, sides.b.root));
  put(root, title, tools, loading());

  function run(side) {
    const first = query.a || (runs.some((each) => each.place === state.place) || !runs.length ? state.place : runs[0].place);
    return side === "a" ? first : query.b || (first === state.place ? first : partner(runs, first));
  }
  function splits() { return [...new Set([...lists.a, ...lists.b].map((each) => each.split))].sort((a, b) => (a === "train") - (b === "train")); }
  function split() { return query.split || splits()[0] || "eval/heldout"; }
  function stepsOf(side) { return lists[side].filter((each) => each.split === split()); }
  // The step in sight: the one chosen; else the newest that is recorded, and for A beside itself the first.
  function step(side) {
    const chosen = query[`step_${side}`], all = stepsOf(side), recorded = all.filter((each) => each.recorded), of = recorded.length ? recorded : all;
    if (chosen !== undefined) return Number(chosen);
    const found = side === "a" && run("a") === run("b") ? of[0] : of[of.length - 1];
    return found ? found.iteration : null;
  }
  function sample() { return Number(query.sample) || 0; }
  function samples() { return answer ? Math.min(answer.a.samples, answer.b.samples) : 1; }
  function kinds() { return answer ? present(answer.a.numbers || {}).filter((name) => present(answer.b.numbers || {}).includes(name)) : []; }
  function how() { return query.colour === "plain" || kinds().includes(query.colour) ? query.colour : "words"; }

  function drawTools() {
    const at = problems.indexOf(problem()), all = splits();
    if (document.activeElement !== field) field.value = visible(problem() || "");
    keepingFocus(tools, () => put(tools, all.length > 1 ? choice("split", all.map((each) => [each, splitName(each)]), split(), (value) => patch({split: value, problem: null, sample: null, step_a: null, step_b: null})) : null,
      el("span", {class: "segments"}, button("‹", () => other(-1), {"aria-label": "previous problem", disabled: at === 0}), button("›", () => other(1), {"aria-label": "next problem", disabled: at >= 0 && at === problems.length - 1})), field, names,
      problems.length ? el("span", {class: "small muted"}, at >= 0 ? `${at + 1} of ${problems.length}` : plural(problems.length, "problem")) : null,
      samples() > 1 ? choice("sample", Array.from({length: Math.min(samples(), 200)}, (_, i) => [i, `sample ${i}`]), sample(), (value) => patch({sample: value === "0" ? null : value})) : null,
      button("swap", () => patch({a: run("b"), b: run("a"), step_a: step("b"), step_b: step("a")}), {title: "A and B change places"}),
      split().startsWith("eval/") ? el("a", {class: "small", href: link("problems", home, {set: split().slice(5), id: problem(), sort: query.order})}, "in Problems") : null));
    for (const side of ["a", "b"]) sides[side].drawHead(runs, run(side), stepsOf(side).map((each) => each.iteration), step(side));
  }

  function problem() { return query.problem || (answer ? answer.problem : null); }

  function divide() {
    if (!answer.diverge) return null;
    const [turn, token] = answer.diverge;
    return {turn, token, words: "first token that differs"};
  }

  // In words: how far they agree, and with what each goes on.
  function parting() {
    const {a, b, diverge} = answer;
    if (!a.pieces || !b.pieces) return "Words that only one of the two has are marked; where their tokens part is not known, as the tokens of a step are not recorded.";
    if (!diverge) return JSON.stringify(a.pieces) === JSON.stringify(b.pieces) ? "The same answer, token for token." : "One answer is the beginning of the other.";
    const [turn, token] = diverge, before = (side) => side.pieces.slice(0, turn).reduce((sum, each) => sum + each.length, 0);
    const then = (side) => {
      const piece = side.pieces[turn][token], surprisal = side.numbers.surprisal;
      if (piece === undefined) return "ends";
      return `goes on with ${JSON.stringify(shortened(piece, 40))}${surprisal ? ` (surprisal ${number(surprisal[before(side) + token])} nats)` : ""}`;
    };
    const same = before(a) + token, lines = answer.by === "lines" ? " Texts as long as these are compared line by line." : "";
    return `${same ? `The first ${plural(same, "token")} ${same === 1 ? "is" : "are"} the same` : "The first token differs"}${turn ? `, up to turn ${turn + 1}` : ""}; then A ${then(a)}, B ${then(b)}.${lines}`;
  }

  function drawColours() {
    const now = how(), scale = kinds().includes(now) ? scaleOf(now, [...answer.a.numbers[now], ...answer.b.numbers[now]]) : null;
    keepingFocus(colours, () => put(colours, el("span", {class: "segments", role: "group", "aria-label": "what is marked"}, [["words", "words that differ"], ["plain", "plain"], ...kinds().map((each) => [each, NUMBERS[each].title])].map(([each, words]) =>
      button(words, () => patch({colour: each === "words" ? null : each}, {replace: true}), {"aria-pressed": String(each === now), title: NUMBERS[each] ? NUMBERS[each].words : null}))),
    scale ? legend(now, scale) : now === "words" ? el("span", {class: "legendline"}, el("span", {class: "side a"}, el("mark", {class: "only"}, "only in A")), el("span", {class: "side b"}, el("mark", {class: "only"}, "only in B")), el("span", {class: "fork", "aria-hidden": "true"}, "▶"), "first token that differs") : null));
    const [aw, bw] = answer.words, more = {changes: answer.changes, how: scale ? {name: now, scale} : now, divide: divide()};
    for (const [side, words] of [["a", aw], ["b", bw]]) sides[side].draw(answer[side], {...more, words, place: {run: run(side), index: answer[side].index}});
    drawn = now;
  }

  function draw() {
    const {prompt: asking} = answer.a;
    put(title, el("h1", null, "Same prompt"), el("p", {class: "muted"}, [splitName(answer.split), shortened(String(answer.problem), 90)].join(" · "), (asking.tags || []).map((tag) => [" ", el("span", {class: "chip"}, tag)])));
    put(above, promptOf(asking.messages.length ? asking : answer.b.prompt));
    said.textContent = visible(parting());
    put(wrong);
    drawColours();
  }

  async function listProblems() {
    const key = JSON.stringify([split(), query.order, split() === "train" ? [run("a"), step("a")] : 0]);
    if (key === listed) return;
    listed = key;
    let found = [];
    try {
      found = split().startsWith("eval/") ? (await get("problems", {at: home, set: split().slice(5), sort: query.order || "problem", count: MOST})).problems.map((each) => each.id)
        : [...new Set((await get("rollouts", {at: run("a"), split: split(), iteration: step("a"), count: 1})).groups.map((each) => each.problem_id))];
    } catch (error) { /* Without the list, one problem alone is shown. */ }
    if (stopped || listed !== key) return;
    problems = found;
    put(names, problems.map((each) => el("option", {value: each})));
    drawTools();
  }

  async function read() {
    try {
      if (!runs.length) [runs, home] = await Promise.all([family(state.place), campaignOf(state.place)]);
      const wanted = [run("a"), run("b")], signal = next();
      const known = lists.of && lists.of.join("\n") === wanted.join("\n") ? [lists.a, lists.b] : (await Promise.all(wanted.map((at) => get("iterations", {at}, signal)))).map((each) => each.iterations);
      if (stopped) return;
      lists = {a: known[0], b: known[1], of: wanted};
      if (!body.isConnected) put(root, title, tools, body);
      if (!stepsOf("a").length || !stepsOf("b").length) { drawTools(); noSteps(); return; }
      const question = {a: wanted[0], b: wanted[1], split: split(), step_a: step("a"), step_b: step("b"), problem: query.problem, sample: sample()}, key = JSON.stringify(question);
      if (key !== asked) {
        drawTools();
        const found = await get("prompt", question, signal);
        if (stopped) return;
        asked = key;
        for (const side of ["a", "b"]) found[side].numbers = cleaned(found[side].numbers || {});
        answer = found;
        draw();
        drawTools();
      } else if (how() !== drawn) drawColours();
      listProblems();
    } catch (error) {
      if (stopped || gone(error)) return;
      asked = "";
      if (!body.isConnected) put(root, title, tools, body);
      if (lists.of) drawTools();
      for (const side of ["a", "b"]) sides[side].fail();
      put(above); put(colours); said.textContent = "";
      put(wrong, failed(error, read));
      if (lists.of) listProblems();
    }
  }

  function noSteps() {
    const bare = !lists.a.length && !lists.b.length;
    put(wrong, bare ? nothing("Nothing has been sampled yet", "Answers appear here with the first evaluation.") : nothing(`One of the two has sampled nothing as ${splitName(split())}`, "Choose another run or split."));
  }

  function other(by) {
    const at = problems.indexOf(problem()), to = problems[at + by];
    if (to !== undefined) patch({problem: to, sample: null});
  }

  function nextSample(by) {
    const to = sample() + by;
    if (to >= 0 && to < samples()) patch({sample: to || null}); else other(by);
  }

  function move(by, which) {
    const changes = {};
    for (const side of which) { const to = sides[side].steps.beside(by); if (to !== null) changes[`step_${side}`] = to; }
    if (Object.keys(changes).length) patch({step_a: step("a"), step_b: step("b"), ...changes}, {replace: true});
  }

  function cycle(by) {
    if (!answer) return;
    const all = ["words", "plain", ...kinds()], to = all[(all.indexOf(how()) + by + all.length) % all.length];
    patch({colour: to === "words" ? null : to}, {replace: true});
  }

  const grow = spaced(() => { lists.of = null; read(); }, 3000);
  read();
  return {
    title: "Same prompt",
    update(to) { query = to.query; read(); },
    changed(event) { if ((event.what || []).includes("evals")) grow(); },
    stop() { stopped = true; next.stop(); grow.stop(); },
    keys: {j: ["next sample, then the next problem", () => nextSample(1)], k: ["previous sample or problem", () => nextSample(-1)], g: ["next problem", () => other(1)], G: ["previous problem", () => other(-1)],
      h: ["both a step back", () => move(-1, ["a", "b"])], l: ["both a step forward", () => move(1, ["a", "b"])], H: ["B a step back", () => move(-1, ["b"])], L: ["B a step forward", () => move(1, ["b"])],
      c: ["next colour", () => cycle(1)], C: ["previous colour", () => cycle(-1)], d: ["words that differ, or not", () => patch({colour: how() === "words" ? "plain" : null}, {replace: true})]},
  };
}
