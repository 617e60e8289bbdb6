// A rollout token by token: elements that are made once and coloured by setting classes, read by pointing and by keys.

import {html, useLayoutEffect, useMemo, useRef, visible} from "../lib/html.js";
import {Turns} from "./conversation.js";
import {facts} from "./token_numbers.js";

/**
 * @typedef {import("./token_numbers.js").Numbers} Numbers
 * @typedef {import("./token_numbers.js").Scale} Scale
 * @typedef {import("./token_numbers.js").Values} Values
 * @typedef {{at: number | null, scroll: boolean}} Chosen `scroll` brings the token into sight
 * @typedef {{turn: number, token: number, words: string}} ForkPlace
 */

const MOVES = /** @type {Record<string, number>} */ ({ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10});

function kindOf(piece) {
  return piece === "" ? "t nil" : piece.includes("\n") ? "t line" : "t";
}

/** The place at which two answers part. @param {{words: string}} props */
export function Fork({words}) {
  return html`<span class="fork" role="img" aria-label=${words} title=${words}>▶</span>`;
}

// Return the text of token i, counted over all turns.
function pieceAt(pieces, i) {
  let rest = i;
  for (const turn of pieces) {
    if (rest < turn.length) return turn[rest];
    rest -= turn.length;
  }
  return "";
}

/** Return the numbers of the turns' first tokens. @param {string[][]} pieces */
export function startsOf(pieces) {
  let at = 0;
  return pieces.map((turn) => (at += turn.length) - turn.length);
}

/** @param {{pieces: string[], first: number, fork: ForkPlace | null}} props */
function TokenSpans({pieces, first, fork}) {
  const spans = pieces.map((piece, k) => html`<span class=${kindOf(piece)} data-at=${first + k}>${piece}</span>`);
  if (fork) spans.splice(fork.token, 0, html`<${Fork} words=${fork.words} />`);
  const empty = html`<span class="muted">(an empty text)</span>`;
  return html`<div class="tokentext" dir="auto">${spans.length ? spans : empty}</div>`;
}

// Set the classes of all tokens by a scale; null takes the colours away.
function paint(spans, kinds, values, scale) {
  spans.forEach((span, i) => {
    const css = scale && values ? scale.css(values[i]) : "";
    const name = css ? `${kinds[i]} ${css}` : kinds[i];
    if (span.className !== name) span.className = name;
  });
}

/**
 * What pointing, clicking and keys do over tokens; `onPick(i, byKeys)`, `onPoint(i | null)`.
 * @param {{count: number, chosen: number | null, onPick: (i: number, byKeys: boolean) => void,
 *   onPoint: (i: number | null) => void}} options
 */
function tokenEvents({count, chosen, onPick, onPoint}) {
  const of = (event) => {
    const span = event.target.closest(".t[data-at]");
    return span ? Number(span.dataset.at) : null;
  };
  return {
    onPointerOver: (event) => of(event) !== null && onPoint(of(event)),
    onPointerLeave: () => onPoint(null),
    onClick: (event) => {
      const i = of(event);
      if (i !== null && String(getSelection()) === "") onPick(i, false);
    },
    onFocus: ({target, currentTarget}) => {
      const isEntered = target === currentTarget && target.matches(":focus-visible");
      if (isEntered && chosen === null && count) onPick(0, true);
    },
    onKeyDown: (event) => {
      const {key, target, currentTarget} = event;
      const end = key === "Home" ? 0 : key === "End" ? count - 1 : null;
      const isModified = event.ctrlKey || event.metaKey || event.altKey;
      if ((!(key in MOVES) && end === null) || target !== currentTarget || isModified) return;
      event.preventDefault();
      const to = end ?? (chosen === null ? 0 : chosen + MOVES[key]);
      if (count) onPick(Math.max(0, Math.min(count - 1, to)), true);
    },
  };
}

/**
 * The turns of a rollout as tokens, coloured by `values` on `scale`; without `pieces` their texts.
 * @param {object} props
 * @param {string} props.label
 * @param {any} props.line
 * @param {string[][] | null} props.pieces
 * @param {Values | null} [props.values]
 * @param {Scale | null} [props.scale]
 * @param {Chosen} props.chosen
 * @param {(i: number, byKeys: boolean) => void} props.onPick
 * @param {(i: number | null) => void} props.onPoint
 * @param {ForkPlace | null} [props.fork]
 * @param {any} [props.children] what stands above the turns; not drawn again
 */
export function TokenArea({label, line, pieces, values, scale, chosen, onPick, onPoint, fork = null, children}) {
  const root = useRef(/** @type {HTMLElement | null} */ (null));
  const spans = useRef(/** @type {HTMLElement[]} */ ([]));
  const kinds = useMemo(() => (pieces || []).flat().map(kindOf), [pieces]);
  const content = useMemo(() => {
    const starts = startsOf(pieces || []);
    const body = (turn, k) => {
      const own = fork && fork.turn === k ? fork : null;
      return html`<${TokenSpans} pieces=${/** @type {any} */ (pieces)[k]} first=${starts[k]} fork=${own} />`;
    };
    return html`${children}<${Turns} line=${line} body=${pieces ? body : null} />`;
  }, [line, pieces, fork]);
  useLayoutEffect(() => {
    const element = /** @type {HTMLElement} */ (root.current);
    spans.current = [...element.querySelectorAll(".t[data-at]")].map((each) => /** @type {HTMLElement} */ (each));
  }, [content]);
  useLayoutEffect(() => {
    paint(spans.current, kinds, values, scale);
  }, [content, values, scale]);
  useLayoutEffect(() => {
    const span = chosen.at === null ? null : spans.current[chosen.at];
    if (!span) return;
    span.setAttribute("data-on", "");
    if (chosen.scroll) span.scrollIntoView({block: "nearest"});
    return () => span.removeAttribute("data-on");
  }, [content, chosen]);
  const events = tokenEvents({count: kinds.length, chosen: chosen.at, onPick, onPoint});
  return html`<div class="conversation" ref=${root} tabindex="0" role="group" aria-label=${label} ...${events}>
    ${content}
  </div>`;
}

function quoted(text) {
  return text === "" ? "(no text of its own)" : JSON.stringify(visible(text));
}

/**
 * @param {Numbers} numbers
 * @param {string[][]} pieces
 */
function rowsOf(numbers, pieces, i) {
  const starts = startsOf(pieces);
  const total = pieces.reduce((sum, turn) => sum + turn.length, 0);
  const turn = starts.filter((first) => first <= i).length;
  const where = `${i} of ${total}${starts.length > 1 ? `, turn ${turn}` : ""}`;
  const text = quoted(pieceAt(pieces, i));
  return /** @type {[string, string, string][]} */ ([
    ["token", where, ""],
    ["text", text, "text"],
    ...facts(numbers, i),
  ]);
}

/**
 * All numbers of the token that is pointed at.
 * @param {{numbers: Numbers, pieces: string[][], at: number | null, name: string | null}} props
 */
export function TokenFacts({numbers, pieces, at, name}) {
  const hint = html`<div class="hint">
    <dt>token</dt><dd class="muted">point at a token, or use the arrow keys in the text</dd>
  </div>`;
  const fact = ([title, text, key]) => {
    const css = key === "text" ? "piece" : key && key === name ? "on" : null;
    return html`<div key=${title} class=${css}><dt>${title}</dt><dd title=${text}>${text}</dd></div>`;
  };
  return html`<dl class="facts tokenfacts">${at === null ? hint : rowsOf(numbers, pieces, at).map(fact)}</dl>`;
}

/**
 * The chosen token in words, for those who do not see it.
 * @param {{numbers: Numbers, pieces: string[][], at: number | null}} props
 */
export function SpokenToken({numbers, pieces, at}) {
  const words = at === null ? [] : rowsOf(numbers, pieces, at).map(([title, text]) => `${title} ${text}`);
  return html`<p class="away" role="status">${words.join(", ")}</p>`;
}
