// Keys: those of the frame, those that the page in view adds, and the overlay that lists both.

import {openDialog} from "./components/dialog.js";
import {copy} from "./lib/browser.js";
import {html, useEffect, useRef} from "./lib/html.js";

/** @typedef {Record<string, [words: string, run: () => void]>} KeyMap what a key does, in words and as a function */

/** @type {Map<string, [words: string, run: () => void]>} */
const frame = new Map();
/** @type {Set<() => KeyMap | null>} the keys of each component in view */
const layers = new Set();

export const frameKey = (key, words, run) => frame.set(key, [words, run]);

// Bind keys while the component is mounted; what they do may change with each rendering.
export function useKeys(/** @type {KeyMap | null} */ map) {
  const newest = useRef(map);
  newest.current = map;
  useEffect(() => {
    const layer = () => newest.current;
    layers.add(layer);
    return () => void layers.delete(layer);
  }, []);
}

/** @returns {KeyMap} */
function pageKeys() {
  return Object.assign({}, ...[...layers].map((layer) => layer()));
}

const TYPING = "input:not([type=checkbox]):not([type=range]), select";

function onKeyDown(event) {
  const target = /** @type {HTMLElement} */ (event.target);
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (target.closest && target.closest(TYPING)) {
    if (event.key === "Escape") target.blur();
    return;
  }
  if (document.querySelector("dialog[open]") && event.key !== "?") return;
  if (event.key === "Enter" && target.closest("a, button, summary")) return;
  const [, run] = pageKeys()[event.key] || frame.get(event.key) || [];
  if (!run) return;
  event.preventDefault();
  run();
}

function search() {
  const field = /** @type {HTMLInputElement | null} */ (document.querySelector("main input[type=search]"));
  if (!field) return;
  field.focus();
  field.select();
}

export function startKeys() {
  document.addEventListener("keydown", onKeyDown);
  frameKey("/", "search", search);
  frameKey("y", "copy the link to this view", () => copy(location.href, "Link copied"));
  frameKey("?", "this help", help);
}

// Those of a chart that has the focus (components/chart.js).
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
  if (open) return open.close();
  const rows = (entries) => entries.map(([key, [words]]) => [key, words]);
  const own = rows(Object.entries(pageKeys()));
  const charts = document.querySelector("main .plot[tabindex]");
  openDialog(
    {title: "Keys", id: "help"},
    html`${own.length > 0 && html`<${KeyTable} caption="On this page" rows=${own} />`}
      ${charts && html`<${KeyTable} caption="In a chart that has the focus (Tab)" rows=${CHART_KEYS} />`}
      <${KeyTable} caption="Everywhere" rows=${rows([...frame])} />
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
