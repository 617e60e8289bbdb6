// Keys: those of the frame, those that the page in view adds, and the overlay that lists both.

import {openDialog} from "./components/dialog.js";
import {copy} from "./lib/browser.js";
import {html, useEffect, useRef} from "./lib/html.js";

/**
 * @typedef {Record<string, [words: string | null | undefined, run: () => void]>} KeyMap
 * @typedef {{words: string, run: () => void}} Key
 */

/** @type {Map<string, Key>} */
const frame = new Map();
/** @type {Set<() => KeyMap | null | undefined>} the keys of each component in view */
const layers = new Set();

// Keys have fixed meanings on every page that has such things; a page gives what they do there.
/** @type {Record<string, string>} */
const MEANINGS = {
  j: "next",
  k: "previous",
  h: "step back",
  l: "step forward",
  g: "group",
  c: "colour",
  d: "difference",
  Enter: "open",
};

export function frameKey(key, words, run) {
  frame.set(key, {words, run});
}

// Bind keys while the component is mounted; what they do may change with each rendering.
export function useKeys(map) {
  const newest = useRef(map);
  newest.current = map;
  useEffect(() => {
    const layer = () => newest.current;
    layers.add(layer);
    return () => void layers.delete(layer);
  }, []);
}

/** @returns {Map<string, Key>} */
function pageMap() {
  const entries = [...layers].flatMap((layer) => Object.entries(layer() || {}));
  return new Map(entries.map(([key, [words, run]]) => [key, {words: words || MEANINGS[key], run}]));
}

function isTyping(target) {
  const field = "input:not([type=checkbox]):not([type=radio]):not([type=range]), textarea, select, [contenteditable]";
  return target.closest && target.closest(field);
}

function onKeyDown(event) {
  const target = /** @type {HTMLElement} */ (event.target);
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (isTyping(target)) {
    if (event.key === "Escape") target.blur();
    return;
  }
  if (document.querySelector("dialog[open]") && event.key !== "?") return;
  if (event.key === "Enter" && target.closest("a, button, summary")) return;
  const key = pageMap().get(event.key) || frame.get(event.key);
  if (!key) return;
  event.preventDefault();
  key.run();
}

function search() {
  const field = /** @type {HTMLInputElement | null} */ (document.querySelector("main input[type=search]"));
  if (field) {
    field.focus();
    field.select();
  }
}

export function startKeys() {
  document.addEventListener("keydown", onKeyDown);
  frameKey("/", "search", search);
  frameKey("y", "copy the link to this view", () => copy(location.href, "Link copied"));
  frameKey("?", "this help", help);
}

// Those of a chart that has the focus (charts/cursor_keys.js).
const CHART_KEYS = [
  ["← →", "the cursor a point back and on, with Shift ten"],
  ["Home", "the first point"],
  ["End", "the last point"],
  ["+", "zoom in around the cursor"],
  ["-", "zoom out"],
  ["Escape", "all of the x axis again, then no cursor"],
];

function KeyTable({caption, rows}) {
  const row = ([key, words]) => html`<tr key=${key}><td><kbd>${key}</kbd></td><td>${words}</td></tr>`;
  return html`<table><caption>${caption}</caption><tbody>${rows.map(row)}</tbody></table>`;
}

export function help() {
  const open = /** @type {HTMLDialogElement | null} */ (document.getElementById("help"));
  if (open) {
    open.close();
    return;
  }
  const rows = (map) => [...map].map(([key, {words}]) => [key, words]);
  const own = rows(pageMap());
  const charts = document.querySelector("main .plot[tabindex]");
  openDialog(
    {title: "Keys", id: "help"},
    html`${own.length > 0 && html`<${KeyTable} caption="On this page" rows=${own} />`}
      ${charts && html`<${KeyTable} caption="In a chart that has the focus (Tab)" rows=${CHART_KEYS} />`}
      <${KeyTable} caption="Everywhere" rows=${rows(frame)} />
      <p class="muted">Every view is a link: the address holds all that you chose, back and forward work.</p>`,
  );
}

// Move the focus along the elements that match, for j and k.
export function step(selector, by) {
  const matches = /** @type {HTMLElement[]} */ ([...document.querySelectorAll(selector)]);
  const all = matches.filter((each) => each.offsetParent !== null);
  if (!all.length) return null;
  const at = all.findIndex((each) => each === document.activeElement || each.contains(document.activeElement));
  const start = by > 0 ? 0 : all.length - 1;
  const next = all[at < 0 ? start : Math.min(all.length - 1, Math.max(0, at + by))];
  next.focus({preventScroll: true});
  next.scrollIntoView({block: "nearest"});
  return next;
}
