// @ts-nocheck
// Tokens: one rollout, every token coloured by one of its numbers, all of them told where one points, and their profile.

import {get, gone, newest} from "../api.js";
import {button, choice, el, failed, keepingFocus, loading, nothing, put, spaced} from "../dom.js";
import {plural} from "../format.js";
import {link} from "../router.js";
import {outcome, promptOf, strip, turnsOf} from "./conversation.js";
import {profile} from "./profile.js";
import {Steps, family, promptLink, runChoice, runsOf, splitName} from "./reading.js";
import {NUMBERS, cleaned, legend, present, scaleOf} from "./token_numbers.js";
import {Readout, mark, paint, pieceAt, tokenEvents, tokenSpans} from "./token_text.js";

export function tokens(root, state, frame) {
  const {patch} = frame;
  let query = state.query, runs = [], kin = [], every = [], everyOf = "", answer = null, shown = null, spans = [], chosen = null, stopped = false, drawing = null, line = null, names = [], values = null;
  const next = newest(), nextList = newest(), steps = new Steps("step", (step) => patch({iteration: step, pos: null}, {replace: true}));
  const title = el("div", {class: "title"}, el("h1", null, "Tokens"), el("p", {class: "muted"}));
  const tools = el("div", {class: "tools"}), colours = el("div", {class: "tools paints sticky"}), top = el("div"), chart = el("div", {class: "profiles"});
  const text = el("div", {class: "conversation", tabindex: "0", role: "group", "aria-label": "the rollout's text; arrow keys move from token to token"});
  const readout = new Readout({}), body = el("div", null, loading());
  put(root, title, tools, body);

  function run() { return query.run || (runs.some((each) => each.place === state.place) || !runs.length ? state.place : runs[0].place); }
  function split() { return query.split || "train"; }
  function own() { return every.filter((each) => each.split === split()); }
  function recorded() { return own().filter((each) => each.recorded).map((each) => each.iteration); }
  function colour() { return names.includes(query.colour) ? query.colour : query.colour === "none" ? null : names.includes("credit") && numbers().credit.some((value) => value) ? "credit" : names[0] || null; }
  function numbers() { return answer.numbers || {}; }

  function drawTools() {
    const splits = [...new Set(every.map((each) => each.split))], about = answer && answer.about;
    const all = recorded(), twin = answer && promptLink(kin, state.place, run(), about, answer.prompt.problem_id, sampleOf(answer));
    if (about) steps.set(all.includes(about.iteration) ? all : [...all, about.iteration].sort((a, b) => a - b), about.iteration);
    keepingFocus(tools, () => put(tools, runs.length > 1 ? runChoice("run", runs, run(), (value) => patch({run: value, pos: null})) : null,
      splits.length > 1 ? choice("split", splits.map((each) => [each, splitName(each)]), split(), (value) => patch({split: value, iteration: null, index: null, pos: null})) : null, steps.root,
      answer ? [el("span", {class: "muted small"}, "group"), strip(answer.siblings, index(), (i) => patch({index: i, pos: null}), "samples of the group")] : null,
      answer ? el("a", {class: "small", href: link("rollouts", run(), {split: query.split, iteration: about.iteration, index: index()})}, "in Rollouts") : null,
      twin ? el("a", {class: "small", href: twin}, "Same prompt") : null));
  }

  function index() { return Number(query.index) || 0; }
  function sampleOf({siblings}) { return Math.max(0, siblings.findIndex((each) => each.index === index())); }

  // Colours anew: classes of the tokens only. Its time is kept for the measurement.
  function drawColours() {
    const name = colour();
    const before = performance.now();
    values = name ? numbers()[name] : null;
    const scale = name ? scaleOf(name, values) : null;
    paint(spans, values, scale);
    root.dataset.painted = String(Math.round(100 * (performance.now() - before)) / 100);
    shown = name;
    keepingFocus(colours, () => put(colours, el("span", {class: "segments", role: "group", "aria-label": "colour of the tokens"},
      [[null, "plain"], ...names.map((each) => [each, NUMBERS[each].title])].map(([each, words]) => button(words, () => patch({colour: each || "none"}, {replace: true}),
        {"aria-pressed": String(each === name), title: each ? NUMBERS[each].words : "no colour"}))),
    name ? legend(name, scale) : null, readout.root));
    line = name ? profile(name, values, {starts: starts(), pick: (i) => choose(i, true), point: hover}) : null;
    put(chart, line ? line.root : null);
    if (line) line.mark(chosen);
    tell(chosen, false);
  }

  function starts() {
    let at = 0;
    return (answer.pieces || []).map((turn) => { at += turn.length; return at - turn.length; });
  }

  function words(i) {
    const all = starts(), turn = all.length - 1 - [...all].reverse().findIndex((first) => first <= i);
    return `of ${spans.length}${all.length > 1 ? `, turn ${turn + 1}` : ""}`;
  }

  function tell(i, speak) {
    if (i === null || !spans[i]) readout.show(null, ""); else readout.show(i, pieceAt(answer.pieces, i), {speak, chosen: shown, words: words(i)});
  }

  function hover(i) {
    tell(i === null ? chosen : i, false);
    if (line) line.point(i);
  }

  function choose(i, scroll, push = true) {
    mark(spans, chosen, i, scroll);
    chosen = i;
    tell(i, true);
    if (line) line.mark(i);
    if (push) { clearTimeout(choose.timer); choose.timer = setTimeout(() => { if (!stopped && answer && String(chosen) !== (query.pos || "")) pin(); }, 250); }
  }

  // The chosen token fixes its step too, as the newest one moves on while a run trains.
  function pin() {
    drawing = [run(), split(), String(answer.about.iteration), index()].join("\n"); // as question() will name it
    patch({iteration: answer.about.iteration, pos: chosen}, {replace: true});
  }

  function draw() {
    const {prompt, line: rollout, pieces, about} = answer;
    const many = spans.length;
    put(title, el("h1", null, "Tokens"), el("p", {class: "muted"}, [splitName(about.split), `step ${about.iteration}`, prompt.problem_id, `sample ${rollout.sample ?? index()}`, many ? plural(many, "token") : null].filter((each) => each !== null && each !== undefined).join(" · "), (prompt.tags || []).map((tag) => [" ", el("span", {class: "chip"}, tag)])));
    put(top, outcome(rollout));
    let at = 0;
    put(text, promptOf(prompt), turnsOf(rollout, pieces ? (turn, k) => {
      const part = spans.slice(at, at + pieces[k].length);
      at += pieces[k].length;
      return el("div", {class: "tokentext", dir: "auto"}, part.length ? part : el("span", {class: "muted"}, "(an empty text)"));
    } : null));
    put(body, top, pieces ? null : unrecorded(), pieces ? colours : null, chart, text, readout.spoken);
  }

  function unrecorded() {
    const all = recorded(), near = all.reduce((best, step) => (best === null || Math.abs(step - answer.about.iteration) < Math.abs(best - answer.about.iteration) ? step : best), null);
    return el("p", {class: "card"}, `The tokens of step ${answer.about.iteration} are not recorded${answer.line.whole === false ? "; its text may be shortened" : ""}. `,
      near === null ? "[logging] rollouts_every says at which steps they are." : el("a", {href: link("tokens", state.place, {...query, iteration: near, pos: null})}, `Step ${near} has them.`));
  }

  function makeSpans() {
    spans = [];
    for (const turn of answer.pieces || []) spans.push(...tokenSpans(turn, spans.length));
    chosen = query.pos !== undefined && spans[Number(query.pos)] ? Number(query.pos) : null;
  }

  // What is asked for now, and its name.
  function question() {
    const asked = {at: run(), split: split(), iteration: query.iteration, index: index()};
    return {asked, wanted: Object.values(asked).join("\n")};
  }

  async function read() {
    try {
      if (!runs.length) [runs, kin] = await Promise.all([runsOf(state.place), family(state.place)]);
      if (stopped) return;
      const {asked, wanted} = question(), {at} = asked;
      // Back at what is drawn: whatever was asked for in between is not to be drawn any more.
      if (wanted === drawing && answer) { next.stop(); again(); return; }
      nextList.stop();
      const signal = next();
      const listed = get("iterations", {at}, signal);
      // Of a split that the run does not have, nothing is asked.
      if (everyOf !== at || !own().length) {
        every = (await listed).iterations;
        everyOf = at;
        if (stopped) return;
        if (!own().length) { other(); return; }
      }
      const [found, list] = await Promise.all([get("rollout", asked, signal), listed]);
      if (stopped) return;
      answer = {...found, numbers: cleaned(found.numbers)};
      every = list.iterations;
      names = present(numbers());
      readout.set(numbers());
      drawing = wanted;
      const before = performance.now();
      makeSpans();
      draw();
      drawTools();
      if (answer.pieces) drawColours(); else { put(chart); line = null; }
      root.dataset.drawn = String(Math.round(performance.now() - before));
      if (chosen !== null) choose(chosen, true, false);
    } catch (error) {
      if (stopped || gone(error)) return;
      drawing = null;
      put(body, failed(error, read));
    }
  }

  // A split that a run does not have: those that it has.
  function other() {
    answer = drawing = null;
    if (every.length) { patch({split: every[0].split, iteration: null, index: null}, {replace: true}); return; }
    put(body, nothing("Nothing has been sampled yet", "Rollouts appear here with the first step."));
    drawTools();
  }

  function again() {
    if (answer.pieces && colour() !== shown) drawColours();
    const token = query.pos === undefined ? null : Number(query.pos);
    if (answer.pieces && token !== chosen) choose(spans[token] ? token : null, false, false);
  }

  function sibling(by) {
    if (!answer) return;
    const all = answer.siblings.map((each) => each.index), at = all.indexOf(index());
    if (all[at + by] !== undefined) patch({index: all[at + by], pos: null});
  }

  function group(by) {
    if (!answer) return;
    const all = answer.siblings.map((each) => each.index), to = by > 0 ? Math.max(...all) + 1 : Math.min(...all) - 1;
    if (to >= 0 && to < (answer.about.rollouts ?? Infinity)) patch({index: to, pos: null});
  }

  function cycle(by) {
    if (!answer || !names.length) return;
    const all = [null, ...names], name = all[(all.indexOf(shown) + by + all.length) % all.length];
    patch({colour: name || "none"}, {replace: true});
  }

  function move(by) { const step = steps.beside(by); if (step !== null) patch({iteration: step, pos: null}); }

  tokenEvents(text, {count: () => spans.length, point: hover, pick: (i, keyed) => choose(i, keyed), chosen: () => chosen});
  const grow = spaced(async () => {
    try {
      every = (await get("iterations", {at: run()}, nextList())).iterations;
      if (answer) drawTools(); else read();
    } catch (error) { if (!gone(error)) console.warn(error); }
  }, 3000);
  read();
  return {
    title: "Tokens",
    update(to) { query = to.query; read(); },
    changed(event) { if ((event.what || []).some((each) => each === "metrics" || each === "evals")) grow(); },
    stop() { stopped = true; next.stop(); nextList.stop(); grow.stop(); },
    keys: {j: ["next sample of the group", () => sibling(1)], k: ["previous sample", () => sibling(-1)], h: ["step back", () => move(-1)], l: ["step forward", () => move(1)],
      g: ["next group", () => group(1)], G: ["previous group", () => group(-1)], c: ["next colour", () => cycle(1)], C: ["previous colour", () => cycle(-1)]},
  };
}
