// Keys: those of the frame, those that the page in view adds, and the overlay that lists both.

import {copy, el, button} from "./dom.js";

const own = new Map();
let page = new Map();

// Keys have fixed meanings on every page that has such things; a page gives what they do there.
export const MEANINGS = {
  j: "next", k: "previous", h: "step back", l: "step forward", g: "group", c: "colour", d: "difference",
  Enter: "open",
};

export function frameKey(key, words, run) {
  own.set(key, {words, run});
}

// {j: [words, run]}: replaced as a whole when the page changes.
export function pageKeys(map) {
  page = new Map(Object.entries(map || {}).map(([key, [words, run]]) => [key, {words: words || MEANINGS[key], run}]));
}

function typing(target) {
  return target.closest && target.closest("input:not([type=checkbox]):not([type=radio]):not([type=range]), textarea, select, [contenteditable]");
}

export function startKeys() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (typing(event.target)) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (document.querySelector("dialog[open]") && event.key !== "?") return;
    if (event.key === "Enter" && event.target.closest("a, button, summary")) return;
    const found = page.get(event.key) || own.get(event.key);
    if (!found) return;
    event.preventDefault();
    found.run();
  });
  frameKey("/", "search", () => {
    const field = document.querySelector("main input[type=search]");
    if (field) { field.focus(); field.select(); }
  });
  frameKey("y", "copy the link to this view", () => copy(location.href, "Link copied"));
  frameKey("?", "this help", help);
}

// Those of a chart that has the focus (charts/cursor_keys.js).
const CHART_KEYS = [["← →", "the cursor a point back and on, with Shift ten"], ["Home", "the first point"], ["End", "the last point"],
  ["+", "zoom in around the cursor"], ["-", "zoom out"], ["Escape", "all of the x axis again, then no cursor"]];

// Pairs of a key and its {words}.
function rows(map) {
  return [...map].map(([key, {words}]) => el("tr", null, el("td", null, el("kbd", null, key)), el("td", null, words)));
}

export function help() {
  const open = document.getElementById("help");
  if (open) { open.close(); return; }
  const dialog = el("dialog", {id: "help", "aria-labelledby": "help-title"},
    el("div", {class: "head"}, el("h2", {id: "help-title"}, "Keys"), button("Close", () => dialog.close())),
    page.size ? el("table", null, el("caption", null, "On this page"), el("tbody", null, rows(page))) : null,
    document.querySelector("main .plot[tabindex]") ? el("table", null, el("caption", null, "In a chart that has the focus (Tab)"), el("tbody", null, rows(CHART_KEYS.map(([key, words]) => [key, {words}])))) : null,
    el("table", null, el("caption", null, "Everywhere"), el("tbody", null, rows(own))),
    el("p", {class: "muted"}, "Every view is a link: the address holds all that you chose, back and forward work."));
  dialog.addEventListener("close", () => dialog.remove());
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  document.body.append(dialog);
  dialog.showModal();
}

// Moves the focus along the elements that match, for j and k.
export function step(selector, by) {
  const all = [...document.querySelectorAll(selector)].filter((each) => each.offsetParent !== null);
  if (!all.length) return null;
  const at = all.findIndex((each) => each === document.activeElement || each.contains(document.activeElement));
  const next = all[at < 0 ? (by > 0 ? 0 : all.length - 1) : Math.min(all.length - 1, Math.max(0, at + by))];
  next.focus({preventScroll: true});
  next.scrollIntoView({block: "nearest"});
  return next;
}
