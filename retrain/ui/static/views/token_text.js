// A rollout token by token: elements that are made once and coloured by setting classes, read by pointing and by keys.

import {Tabs} from "../components/inputs.js";
import {NUMBERS, facts} from "../components/token_scales.js";
import {html, useElement, useLayoutEffect, useMemo, useRef, visible} from "../lib/html.js";
import {EMPTY_TEXT, Turns} from "./conversation.js";

const MOVES = /** @type {Record<string, number>} */ ({ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10});
export function ColourChoice({names, value, scale, onChoose}) {
  const options = [["none", "plain"], ...names.map((name) => [name, NUMBERS[name].title, NUMBERS[name].words])];
  const stop = ([css, text]) => html`<span class=${`t ${css}`} key=${text}>${text}</span>`;
  const legend = () => html`<span class="legendline" title=${NUMBERS[value].words}>
    <span class="muted">${NUMBERS[value].title}: </span>${scale.stops.map(stop)}
  </span>`;
  return html`<${Tabs} label="colour of the tokens" options=${options} value=${value} onChoose=${onChoose} />
    ${scale && legend()}`;
}

function kindOf(piece) {
  return piece === "" ? "t nil" : piece.includes("\n") ? "t line" : "t";
}

export function startsOf(pieces) {
  let at = 0;
  return pieces.map((turn) => (at += turn.length) - turn.length);
}

/** Return what pointing, clicking and keys do over tokens; `onPick(i, byKeys)`, `onPoint(i | null)`. */
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

// The turns of a rollout as tokens, coloured by `values` on `scale`; without `pieces` their texts. `chosen` is
// {at, scroll}: `scroll` brings the token into sight. `children`: what stands above the turns; not drawn again.
export function TokenArea({label, line, pieces, values, scale, chosen, onPick, onPoint, children = null}) {
  const root = useElement();
  const spans = useRef(/** @type {HTMLElement[]} */ ([]));
  const kinds = useMemo(() => (pieces || []).flat().map(kindOf), [pieces]);
  const content = useMemo(() => {
    const starts = startsOf(pieces || []);
    const span = (first) => (piece, i) => html`<span class=${kindOf(piece)} data-at=${first + i}>${piece}</span>`;
    const body = (turn, k) => html`<div class="tokentext" dir="auto">
      ${pieces[k].length ? pieces[k].map(span(starts[k])) : EMPTY_TEXT}
    </div>`;
    return html`${children}<${Turns} line=${line} body=${pieces ? body : null} />`;
  }, [line, pieces]);
  useLayoutEffect(() => {
    spans.current = [...root.current.querySelectorAll(".t[data-at]")];
  }, [content]);
  useLayoutEffect(() => {
    spans.current.forEach((span, i) => {
      const name = `${kinds[i]} ${scale ? scale.css(values[i]) : ""}`.trimEnd();
      if (span.className !== name) span.className = name;
    });
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

/** Return what is known of a token: title, text, name. @returns {any[]} */
function rowsOf(numbers, pieces, i) {
  const all = pieces.flat();
  const turn = startsOf(pieces).filter((first) => first <= i).length;
  const where = `${i} of ${all.length}${pieces.length > 1 ? `, turn ${turn}` : ""}`;
  const text = all[i] ? JSON.stringify(visible(all[i])) : "(no text of its own)";
  return [["token", where, ""], ["text", text, "text"], ...facts(numbers, i)];
}

export function TokenFacts({numbers, pieces, at, name}) {
  const hint = html`<div>
    <dt>token</dt><dd class="muted">point at a token, or use the arrow keys in the text</dd>
  </div>`;
  const fact = ([title, text, key]) => {
    const css = key === "text" ? "piece" : key && key === name ? "on" : null;
    return html`<div key=${title} class=${css}><dt>${title}</dt><dd title=${text}>${text}</dd></div>`;
  };
  return html`<dl class="facts tokenfacts">${at === null ? hint : rowsOf(numbers, pieces, at).map(fact)}</dl>`;
}

// The chosen token in words, for those who do not see it.
export function SpokenToken({numbers, pieces, at}) {
  const words = at === null ? [] : rowsOf(numbers, pieces, at).map(([title, text]) => `${title} ${text}`);
  return html`<p class="away" role="status">${words.join(", ")}</p>`;
}
