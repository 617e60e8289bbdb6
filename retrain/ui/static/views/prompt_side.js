// One side of "Same prompt": its run and step, how it ended, and its text with words that differ or tokens coloured.

import {RunChoice} from "../components/inputs.js";
import {Swatch} from "../components/marks.js";
import {link, useAddress} from "../lib/address.js";
import {html} from "../lib/html.js";
import {EMPTY_TEXT, Outcome, Turns} from "./conversation.js";
import {Steps} from "./reading.js";

/** @typedef {[from: number, to: number]} Span of characters */

const PARTING = "first token that differs";
const FORK = html`<span class="fork" role="img" aria-label=${PARTING} title=${PARTING}>▶</span>`;

/**
 * Return the characters that the other side's text has not.
 * @param {string[]} words
 * @param {[string, number, number, number, number][]} changes
 * @returns {Span[]}
 */
function ownSpans(words, changes, side) {
  const starts = [0];
  for (const word of words) starts.push(starts[starts.length - 1] + word.length);
  const [first, last] = side === "a" ? [1, 2] : [3, 4];
  const own = changes.filter((change) => change[0] !== "equal" && change[last] > change[first]);
  return own.map((change) => [starts[Number(change[first])], starts[Number(change[last])]]);
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

export function Side({side, runs, run, steps, step, children}) {
  const {patch} = useAddress();
  const name = side.toUpperCase();
  const found = runs.find((each) => each.place === run);
  const move = (to) => patch({[`step_${side}`]: to}, {replace: true});
  return html`<section class=${`side ${side}`} aria-label=${name}>
    <div class="tools sidehead">
      <b class="letter">${name}</b>${found && html`<${Swatch} index=${found.index} />`}
      <${RunChoice} label=${`run of ${name}`} ...${{runs, value: run}} onChoose=${(value) => patch({[side]: value})} />
      <${Steps} label=${`step of ${name}`} steps=${steps} step=${step} onStep=${move} />
    </div>
    ${children}
  </section>`;
}

// The answer of a side, the words that only it has marked, and the fork where its tokens part from the other's.
export function SideAnswer({data, side, run}) {
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
