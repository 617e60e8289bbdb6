// @ts-nocheck
// One side of "Same prompt": its run and step, how it ended, and its text with words that differ or tokens coloured.

import {swatch} from "../colours.js";
import {el, keepingFocus, put} from "../dom.js";
import {link} from "../router.js";
import {outcome, turnsOf} from "./conversation.js";
import {Steps, runChoice} from "./reading.js";
import {Readout, mark, paint, pieceAt, tokenEvents, tokenSpans} from "./token_text.js";

function fork(words) {
  return el("span", {class: "fork", role: "img", "aria-label": words, title: words}, "▶");
}

// Which characters of a side's text the other has not: [[from, to]], out of the changes over words.
function own(words, changes, side) {
  const starts = [0];
  for (const word of words) starts.push(starts[starts.length - 1] + word.length);
  const [first, last] = side === "a" ? [1, 2] : [3, 4];
  return changes.filter((change) => change[0] !== "equal" && change[last] > change[first]).map((change) => [starts[change[first]], starts[change[last]]]);
}

// Characters [from, to) of the text, those in `spans` marked, and the fork where `at` lies.
function marked(text, from, to, spans, at, words) {
  const cuts = new Set([from, to]);
  for (const [a, b] of spans) for (const cut of [a, b]) if (cut > from && cut < to) cuts.add(cut);
  if (at !== null && at >= from && at <= to) cuts.add(at);
  const all = [...cuts].sort((a, b) => a - b), parts = [];
  all.forEach((cut, i) => {
    if (cut === at) parts.push(fork(words));
    if (i + 1 === all.length) return;
    const piece = text.slice(cut, all[i + 1]), differs = spans.some(([a, b]) => a <= cut && cut < b);
    parts.push(differs ? el("mark", {class: /\S/.test(piece) ? "only" : "only blank"}, piece) : piece);
  });
  return parts;
}

export class Side {
  // side: "a" or "b"; pick(changes) goes into the URL.
  constructor(side, pick) {
    this.side = side;
    this.pick = pick;
    this.spans = [];
    this.chosen = null;
    this.answer = null;
    this.steps = new Steps(`step of ${side.toUpperCase()}`, (step) => pick({[`step_${side}`]: step}, {replace: true}));
    this.head = el("div", {class: "tools sidehead"});
    this.facts = el("div");
    this.readout = new Readout({});
    this.text = el("div", {class: "conversation", tabindex: "0", role: "group", "aria-label": `answer ${side.toUpperCase()}; arrow keys move from token to token`});
    this.root = el("section", {class: `side ${side}`, "aria-label": side.toUpperCase()}, this.head, this.facts, this.text);
    const show = (i) => this.show(i === null ? this.chosen : i, false);
    tokenEvents(this.text, {count: () => this.spans.length, point: show, chosen: () => this.chosen, pick: (i, keyed) => { mark(this.spans, this.chosen, i, keyed); this.chosen = i; this.show(i, true); }});
  }

  drawHead(runs, run, steps, step) {
    this.steps.set(steps, step);
    const found = runs.find((each) => each.place === run);
    keepingFocus(this.head, () => put(this.head, el("b", {class: "letter"}, this.side.toUpperCase()), found ? swatch(found.index) : null,
      runChoice(`run of ${this.side.toUpperCase()}`, runs, run, (value) => this.pick({[this.side]: value})), this.steps.root));
  }

  fail() {
    this.answer = null;
    this.spans = [];
    put(this.facts);
    put(this.text);
  }

  // The texts; `how` is "words", "plain", or {name, scale} of a number. divide: {turn, token, words} | null.
  draw(answer, {words, changes, how, divide, place}) {
    this.answer = answer;
    this.chosen = null;
    this.readout.set(answer.numbers || {});
    const {line, pieces} = answer, name = typeof how === "object" ? how.name : null;
    put(this.facts, outcome(line), el("p", {class: "small"}, el("a", {href: link("tokens", place.run, {split: answer.about.split, iteration: answer.about.iteration, index: place.index})}, "its tokens"),
      pieces ? null : el("span", {class: "muted"}, " · the tokens of this step are not recorded, its text may be shortened")));
    this.spans = [];
    const texts = line.turns.map((turn) => turn.text), whole = texts.join("\n"), differing = how === "words" ? own(words, changes, this.side) : [];
    const spread = divide && pieces && pieces[divide.turn] ? divide : null;
    let begin = 0;
    put(this.text, turnsOf(line, (turn, k) => {
      const from = begin, to = begin + texts[k].length;
      begin = to + 1;
      if (name && pieces) {
        const part = tokenSpans(pieces[k], this.spans.length);
        this.spans.push(...part);
        const nodes = spread && spread.turn === k ? [...part.slice(0, spread.token), fork(spread.words), ...part.slice(spread.token)] : part;
        return el("div", {class: "tokentext", dir: "auto"}, nodes);
      }
      const at = spread && spread.turn === k ? from + pieces[k].slice(0, spread.token).reduce((sum, piece) => sum + piece.length, 0) : null;
      return el("div", {class: "tokentext", dir: "auto"}, to > from || at !== null ? marked(whole, from, to, differing, at, spread ? spread.words : "") : el("span", {class: "muted"}, "(an empty text)"));
    }), name && pieces ? this.readout.root : null, name && pieces ? this.readout.spoken : null);
    if (name && pieces) { paint(this.spans, answer.numbers[name] || [], how.scale); this.name = name; this.show(null, false); }
  }

  show(i, speak) {
    if (i === null || !this.spans[i]) { this.readout.show(null, ""); return; }
    this.readout.show(i, pieceAt(this.answer.pieces, i), {speak, chosen: this.name, words: `of ${this.spans.length}`});
  }
}
