// The page of one iteration's rollouts: colours of tokens, the order of answers and rows. All texts stand in the HTML.

import {startThemeButton} from "../colours.js";
import {facts, scaleOf} from "../components/token_scales.js";
import {clear, colour, tokenSpan, tokensOf} from "./tokens.js";

/** @typedef {import("../components/token_scales.js").Scale} Scale */

const samples = /** @type {HTMLElement[]} */ ([...document.querySelectorAll(".sample")]);
const toolbar = document.getElementById("toolbar");
/** What tokens can be coloured by, by the attribute that holds it. @type {Record<string, string>} */
const MODES = {s: "surprisal", a: "advantage", v: "value", p: "planning"};
/** @type {{name: string, scale: Scale} | null} what they are coloured by */
let shown = null;

function paint(element) {
  if (shown) colour(element, shown.name, shown.scale);
}

const inSight = new IntersectionObserver(
  (entries) => entries.filter((each) => each.isIntersecting).forEach((each) => paint(each.target)),
  {rootMargin: "600px"},
);

function read(text) {
  const readout = document.getElementById("readout");
  if (readout) readout.textContent = text;
}

function choose(mode) {
  const name = MODES[mode];
  const values = samples.flatMap((element) => tokensOf(element).numbers[name] || []);
  shown = name ? {name, scale: scaleOf(name, values)} : null;
  for (const button of modeButtons()) button.setAttribute("aria-pressed", String(button.dataset.mode === mode));
  const legend = /** @type {HTMLElement} */ (document.getElementById("legend"));
  legend.replaceChildren(...(shown ? shown.scale.stops : []).map(([css, text]) => tokenSpan(css, text)));
  read(shown ? "point at a token" : "");
  inSight.disconnect();
  for (const element of samples) {
    if (shown) inSight.observe(element);
    else clear(element);
  }
}

function modeButtons() {
  return /** @type {HTMLElement[]} */ ([...document.querySelectorAll("[data-mode]")]);
}

function startColours() {
  for (const button of modeButtons()) button.addEventListener("click", () => choose(button.dataset.mode));
  document.addEventListener("mouseover", ({target}) => {
    const token = /** @type {HTMLElement | null} */ (target instanceof Element ? target.closest(".sample .t") : null);
    if (!token) return;
    const i = Number(token.dataset.i);
    const {numbers} = tokensOf(/** @type {HTMLElement} */ (token.closest(".sample")));
    const words = facts(numbers, i).map(([title, text]) => `${title} ${text}`);
    read([JSON.stringify(token.textContent), `token ${i}`, ...words].join(" · "));
  });
  addEventListener("beforeprint", () => samples.forEach(paint));
  const chosen = /^#colou?r=([sapv])$/.exec(location.hash);
  if (chosen && modeButtons().some((button) => button.dataset.mode === chosen[1])) choose(chosen[1]);
}

function startThinking() {
  const button = /** @type {HTMLElement} */ (document.getElementById("unfold"));
  const thoughts = /** @type {HTMLDetailsElement[]} */ ([...document.querySelectorAll("details.think")]);
  button.hidden = !thoughts.length;
  button.addEventListener("click", () => {
    const open = thoughts.some((each) => !each.open);
    for (const each of thoughts) each.open = open;
    button.textContent = open ? "fold thinking" : "unfold thinking";
  });
}

// Sort elements of one parent by a number of each, the largest first; those without one come last.
function sort(elements, valueOf) {
  const rank = (element) => (Number.isNaN(valueOf(element)) ? -Infinity : valueOf(element));
  const ordered = [...elements].sort((a, b) => rank(b) - rank(a) || 0);
  if (ordered.length) /** @type {Element} */ (ordered[0].parentElement).append(...ordered);
}

function startSorting() {
  const choice = /** @type {HTMLSelectElement} */ (document.getElementById("order"));
  choice.addEventListener("change", () => {
    const key = choice.value;
    const valueOf = ({dataset}) => (key === "index" ? -Number(dataset.index) : parseFloat(dataset[key]));
    for (const group of document.querySelectorAll(".samples")) sort([...group.children], valueOf);
  });
  const table = document.querySelector("table.trajectories");
  const heads = table ? [...table.querySelectorAll("th")] : [];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    button.addEventListener("click", () => sortRows(/** @type {Element} */ (table), heads, column));
    head.append(button);
  });
}

// Sort a table's rows by a column, the other way round where it is sorted by it.
function sortRows(table, heads, column) {
  const down = heads[column].getAttribute("aria-sort") !== "descending";
  for (const head of heads) head.removeAttribute("aria-sort");
  heads[column].setAttribute("aria-sort", down ? "descending" : "ascending");
  const texts = (row) => row.children[column].textContent.replace("−", "-");
  const compare = (a, b) => texts(a).localeCompare(texts(b), undefined, {numeric: true});
  const numeric = heads[column].classList.contains("number");
  const order = (a, b) => (numeric ? parseFloat(texts(a)) - parseFloat(texts(b)) || 0 : compare(a, b));
  const rows = [...table.tBodies[0].rows].sort((a, b) => (down ? order(b, a) : order(a, b)));
  table.tBodies[0].append(...rows);
}

startThemeButton();
if (toolbar) {
  toolbar.hidden = false;
  startColours();
  startThinking();
}
if (document.getElementById("order")) startSorting();
