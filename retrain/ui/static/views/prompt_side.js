// One side of "Same prompt": its run and step, how it ended, and its text with words that differ or tokens coloured.

import {Swatch} from "../components/marks.js";
import {html, useEffect, useMemo, useState} from "../lib/html.js";
import {link} from "../router.js";
import {Outcome, Turns} from "./conversation.js";
import {RunChoice, Steps} from "./reading.js";
import {scaleOf} from "./token_numbers.js";
import {Fork, SpokenToken, TokenArea, TokenFacts} from "./token_text.js";

/**
 * @typedef {import("./token_text.js").Chosen} Chosen
 * @typedef {import("./token_text.js").ForkPlace} ForkPlace
 * @typedef {[from: number, to: number]} Span of characters
 */

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

/**
 * Characters `from` to `to` of the text, those in `spans` marked, and the fork where `at` lies.
 * @param {{text: string, from: number, to: number, spans: Span[], at: number | null, words: string}} props
 */
function MarkedWords({text, from, to, spans, at, words}) {
  const isInside = (cut) => cut > from && cut < to;
  const isForked = at !== null && at >= from && at <= to;
  const cuts = new Set([from, to, ...spans.flat().filter(isInside), ...(isForked ? [at] : [])]);
  const all = /** @type {number[]} */ ([...cuts]).sort((a, b) => a - b);
  const parts = all.map((cut, i) => {
    const piece = i + 1 < all.length ? text.slice(cut, all[i + 1]) : "";
    const isOwn = spans.some(([a, b]) => a <= cut && cut < b);
    const mark = piece && isOwn && html`<mark class=${/\S/.test(piece) ? "only" : "only blank"}>${piece}</mark>`;
    return html`${isForked && cut === at && html`<${Fork} words=${words} />`}${mark || piece}`;
  });
  const isEmpty = from === to && !isForked;
  return html`<div class="tokentext" dir="auto">
    ${isEmpty ? html`<span class="muted">(an empty text)</span>` : parts}
  </div>`;
}

/**
 * The texts of a side with the words that only it has marked (none where `words` is null).
 * @param {{answer: any, side: string, words: string[] | null, changes: any[], fork: ForkPlace | null}} props
 */
function WordsText({answer, side, words, changes, fork}) {
  const {line, pieces} = answer;
  const texts = line.turns.map((turn) => turn.text);
  const whole = texts.join("\n");
  const spans = words ? ownSpans(words, changes, side) : [];
  const body = (turn, k) => {
    const from = texts.slice(0, k).reduce((sum, text) => sum + text.length + 1, 0);
    const isHere = fork && pieces && fork.turn === k;
    const before = isHere ? pieces[k].slice(0, fork.token).join("").length : 0;
    const place = {from, to: from + turn.text.length, at: isHere ? from + before : null};
    return html`<${MarkedWords} text=${whole} ...${place} spans=${spans} words=${fork ? fork.words : ""} />`;
  };
  return html`<div class="conversation" tabindex="0" role="group" aria-label=${`answer ${side.toUpperCase()}`}>
    <${Turns} line=${line} body=${body} />
  </div>`;
}

/**
 * @param {{answer: any, side: string, name: string, both: any[], fork: ForkPlace | null}} props `both`: the values of
 *   both sides, which share a scale
 */
function ColouredText({answer, side, name, both, fork}) {
  const {line, pieces, numbers} = answer;
  const scale = useMemo(() => scaleOf(name, both.flat()), [name, ...both]);
  const [chosen, setChosen] = useState(/** @type {Chosen} */ ({at: null, scroll: false}));
  const [pointed, setPointed] = useState(/** @type {number | null} */ (null));
  useEffect(() => setChosen({at: null, scroll: false}), [answer]);
  const label = `answer ${side.toUpperCase()}; arrow keys move from token to token`;
  const values = numbers[name];
  const pick = (at, scroll) => setChosen({at, scroll});
  const area = {label, line, pieces, values, scale, chosen, fork};
  return html`<${TokenArea} ...${area} onPick=${pick} onPoint=${setPointed} />
    <${SpokenToken} numbers=${numbers} pieces=${pieces} at=${chosen.at} />
    <${TokenFacts} numbers=${numbers} pieces=${pieces} at=${pointed ?? chosen.at} name=${name} />`;
}

/**
 * @param {{side: "a" | "b", runs: any[], run: string, steps: number[], step: number | null,
 *   patch: (changes: Record<string, any>, options?: {replace?: boolean}) => void, children?: any}} props
 */
export function Side({side, runs, run, steps, step, patch, children}) {
  const name = side.toUpperCase();
  const found = runs.find((each) => each.place === run);
  const choose = (value) => patch({[side]: value});
  const move = (to) => patch({[`step_${side}`]: to}, {replace: true});
  return html`<section class=${`side ${side}`} aria-label=${name}>
    <div class="tools sidehead">
      <b class="letter">${name}</b>${found && html`<${Swatch} index=${found.index} />`}
      <${RunChoice} label=${`run of ${name}`} runs=${runs} value=${run} onChoose=${choose} />
      <${Steps} label=${`step of ${name}`} steps=${steps} step=${step} onStep=${move} />
    </div>
    ${children}
  </section>`;
}

/**
 * The answer of a side; `how` is "words", "plain" or the name of a number.
 * @param {{data: any, side: "a" | "b", run: string, how: string, both: any[] | null}} props
 */
export function SideAnswer({data, side, run, how, both}) {
  const answer = data[side];
  const {about, line, pieces, index} = answer;
  const fork = useMemo(() => {
    if (!data.diverge || !pieces || !pieces[data.diverge[0]]) return null;
    return {turn: data.diverge[0], token: data.diverge[1], words: "first token that differs"};
  }, [data]);
  const home = link("tokens", run, {split: about.split, iteration: about.iteration, index});
  const words = how === "words" ? data.words[side === "a" ? 0 : 1] : null;
  const unknown = " · the tokens of this step are not recorded, its text may be shortened";
  return html`<${Outcome} line=${line} />
    <p class="small"><a href=${home}>its tokens</a>${!pieces && html`<span class="muted">${unknown}</span>`}</p>
    ${
      both
        ? html`<${ColouredText} ...${{answer, side, name: how, both, fork}} />`
        : html`<${WordsText} ...${{answer, side, words, changes: data.changes, fork}} />`
    }`;
}
