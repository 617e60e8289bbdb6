// @ts-nocheck
// Tokens as elements: made once, coloured by setting classes, read by pointing, focusing and arrow keys.

import {el, put, visible} from "../dom.js";
import {facts} from "./token_numbers.js";

// The text of token `i`, whatever turn it is of.
export function pieceAt(pieces, i) {
  for (const turn of pieces) { if (i < turn.length) return turn[i]; i -= turn.length; }
  return "";
}

// The elements of some tokens' texts; `first` is the number of the first one.
export function tokenSpans(pieces, first) {
  return pieces.map((piece, k) => {
    const span = document.createElement("span");
    span.at = first + k;
    span.kin = piece === "" ? "t nil" : /\n/.test(piece) ? "t line" : "t";
    span.className = span.kin;
    span.append(visible(piece));
    return span;
  });
}

// Classes of all tokens by a scale; null takes the colours away. Nothing but classes is touched.
export function paint(spans, values, scale) {
  for (let i = 0; i < spans.length; i += 1) {
    const css = scale ? scale.css(values[i]) : "";
    const all = css ? `${spans[i].kin} ${css}` : spans[i].kin;
    if (spans[i].className !== all) spans[i].className = all;
  }
}

function quoted(text) {
  return text === "" ? "(no text of its own)" : JSON.stringify(visible(text));
}

// What is read of the token pointed at: a row of numbers that keeps its size, told to screen readers when keys move it.
export class Readout {
  constructor(numbers) {
    this.numbers = numbers;
    this.root = el("dl", {class: "facts tokenfacts"});
    this.spoken = el("p", {class: "away", role: "status"});
    this.boxes = null;
  }

  set(numbers) {
    this.numbers = numbers;
    this.boxes = null;
  }

  show(i, piece, {speak = false, chosen = null, words = ""} = {}) {
    if (i === null) { put(this.root, el("div", {class: "hint"}, el("dt", null, "token"), el("dd", {class: "muted"}, "point at a token, or use the arrow keys in the text"))); this.boxes = null; this.spoken.textContent = ""; return; }
    const rows = [["token", `${i}${words ? ` ${words}` : ""}`, ""], ["text", quoted(piece), ""], ...facts(this.numbers, i)];
    if (!this.boxes || this.boxes.length !== rows.length) {
      this.boxes = rows.map(([title]) => { const dd = el("dd"); return {dd, root: el("div", null, el("dt", null, title), dd)}; });
      put(this.root, this.boxes.map((box) => box.root));
    }
    rows.forEach(([, text, name], k) => {
      const {dd, root} = this.boxes[k];
      if (dd.textContent !== text) dd.textContent = text;
      if (k === 1) dd.title = text;
      root.className = name && name === chosen ? "on" : k === 1 ? "piece" : "";
    });
    if (speak) this.spoken.textContent = rows.map(([title, text]) => `${title} ${text}`).join(", ");
  }
}

// Pointing, clicking and keys over the tokens of `area`: count() of them, point(i | null), pick(i, by keys), chosen().
export function tokenEvents(area, {count, point, pick, chosen}) {
  const of = (event) => { const span = event.target.closest && event.target.closest(".t"); return span && span.at !== undefined ? span.at : null; };
  area.addEventListener("pointerover", (event) => { const i = of(event); if (i !== null) point(i); });
  area.addEventListener("pointerleave", () => point(null));
  area.addEventListener("click", (event) => {
    const i = of(event);
    if (i !== null && String(getSelection()) === "") pick(i, false);
  });
  area.addEventListener("focus", () => { if (chosen() === null && count() && area.matches(":focus-visible")) pick(0, true); });
  area.addEventListener("keydown", (event) => {
    const by = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10}[event.key];
    const end = {Home: 0, End: count() - 1}[event.key];
    if ((by === undefined && end === undefined) || event.target !== area || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    if (!count()) return;
    const now = chosen();
    pick(Math.max(0, Math.min(count() - 1, end ?? (now === null ? 0 : now + by))), true);
  });
}

// Marks the chosen token, and brings it into sight where keys moved it.
export function mark(spans, before, i, scroll) {
  if (before !== null && spans[before]) spans[before].removeAttribute("data-on");
  if (i === null || !spans[i]) return;
  spans[i].setAttribute("data-on", "");
  if (scroll) spans[i].scrollIntoView({block: "nearest"});
}
