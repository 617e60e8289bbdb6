// What a token can be coloured by: a scale from numbers to classes with its legend, and every number in words.

import {Tabs} from "../components/inputs.js";
import {count, number, plural} from "../format.js";
import {html} from "../lib/html.js";

const LEVELS = 6;
const CATEGORIES = 8;

/**
 * @typedef {(number | null)[]} Values of the tokens, null where a number is not known
 * @typedef {Record<string, Values>} Numbers
 * @typedef {object} About
 * @property {string} title
 * @property {"size" | "signed" | "range" | "flag" | "which"} kind 0 to cap, −cap to cap, least to greatest, yes or no,
 *   categories
 * @property {string} words
 * @property {string} [unit]
 * @property {number} [cap]
 * @property {number} [floor] the least cap
 * @property {string} [yes]
 * @property {string} [no]
 * @typedef {{css: (value: number | null) => string, stops: [css: string, text: string][]}} Scale
 */

/** In the order of the key c. @type {Record<string, About>} */
export const NUMBERS = {
  surprisal: {
    ...{title: "surprisal", kind: "size", cap: 4, unit: "nats"},
    words: "−log of the probability with which the token was sampled",
  },
  entropy: {
    ...{title: "entropy", kind: "size", cap: 2, unit: "nats"},
    words: "entropy of the distribution that the token was drawn from",
  },
  advantage: {title: "advantage", kind: "signed", floor: 1e-6, words: "the advantage that the token trains with"},
  credit: {
    ...{title: "credit change", kind: "signed", floor: 1e-4},
    words: "the token's advantage minus that of its rollout or turn: what the credit assignment did",
  },
  mismatch: {
    ...{title: "log-ratio", kind: "signed", floor: 0.02, unit: "nats"},
    words: "log-probability under the trainer minus under the sampler: the mismatch of the two",
  },
  planning: {
    ...{title: "planning", kind: "flag", yes: "planning token", no: "other token"},
    words: "tokens that were taken for planning",
  },
  trained: {
    ...{title: "trained", kind: "flag", yes: "trained on", no: "masked out"},
    words: "tokens that count in the loss",
  },
  version: {title: "version", kind: "which", words: "version of the weights that sampled the token"},
  value: {title: "value", kind: "range", words: "what the critic expected from here on"},
  target: {title: "value target", kind: "range", words: "what the critic was taught to expect"},
};

/** Return the names of the numbers that are known of some token. @param {Numbers} numbers */
export function present(numbers) {
  const isThere = (values) => Array.isArray(values) && values.some((value) => value !== null);
  return Object.keys(NUMBERS).filter((name) => isThere(numbers[name]));
}

/** Set differences of float32 numbers that are no more than rounding to 0. @param {Numbers} numbers */
export function cleaned(numbers) {
  const out = {...numbers};
  for (const name of ["credit", "mismatch"]) {
    if (out[name]) out[name] = out[name].map((value) => (value !== null && Math.abs(value) < 2e-6 ? 0 : value));
  }
  return out;
}

// Return the least round number that is not below this.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return (
    [1, 2, 3, 4, 5, 6, 8, 10].map((factor) => factor * power).find((each) => each >= value * (1 - 1e-9)) || value
  );
}

// The strongest colour begins where 98 of 100 values stay below, so that a single one does not pale the others.
function capOf(values, floor = 1e-6) {
  const sizes = values.map(Math.abs).filter((size) => size > 0);
  sizes.sort((a, b) => a - b);
  const high = sizes.length ? sizes[Math.floor(0.98 * (sizes.length - 1))] : 0;
  return roundUp(Math.max(high, floor));
}

function level(share) {
  return Math.max(1, Math.min(LEVELS, Math.ceil(LEVELS * share - 1e-9)));
}

/** @param {About} about @param {number[]} known @returns {Scale} */
function flags(about, known) {
  const yes = known.filter((value) => value).length;
  return {
    css: (value) => (value === null || value === undefined ? "" : value ? "yes" : "no"),
    stops: [
      ["yes", `${about.yes}: ${count(yes)}`],
      ["no", `${about.no}: ${count(known.length - yes)}`],
    ],
  };
}

/** @param {number[]} known @returns {Scale} */
function categories(known) {
  const all = [...new Set(known)].sort((a, b) => a - b);
  const css = (value) => (value === null || value === undefined ? "" : `w${(all.indexOf(value) % CATEGORIES) + 1}`);
  const many = (value) => plural(known.filter((each) => each === value).length, "token");
  return {css, stops: all.slice(-12).map((value) => [css(value), `${value}: ${many(value)}`])};
}

/** @param {About} about @param {number[]} known @returns {Scale} */
function signed(about, known) {
  const cap = capOf(known, about.floor);
  const css = (value) => {
    if (!value || Math.abs(value) < cap / 1e4) return "";
    return `${value > 0 ? "p" : "m"}${level(Math.abs(value) / cap)}`;
  };
  const text = (share) => `${share > 0 ? "+" : ""}${number(share * cap)}`;
  const unit = about.unit ? ` ${about.unit}` : "";
  return {
    css,
    stops: [
      [css(-cap), `≤ ${text(-1)}${unit}`],
      [css(-cap / 2), text(-0.5)],
      ["", "0"],
      [css(cap / 2), text(0.5)],
      [css(cap), `≥ ${text(1)}${unit}`],
    ],
  };
}

/** @param {About} about @param {number[]} known @returns {Scale} */
function sizes({kind, cap = 1, unit}, known) {
  const isSize = kind === "size";
  const low = isSize || !known.length ? 0 : Math.min(...known);
  const high = isSize ? cap : known.length ? Math.max(...known) : 1;
  const css = (value) => {
    const share = value === null || value === undefined ? 0 : (value - low) / (high - low || 1);
    return share < 0.02 ? "" : `s${level(share)}`;
  };
  const stop = (share) => {
    const at = low + share * (high - low);
    const end = share === 1 && unit ? ` ${unit}` : "";
    return /** @type {[string, string]} */ ([css(at), `${share === 1 && isSize ? "≥ " : ""}${number(at)}${end}`]);
  };
  return {css, stops: [0, 0.25, 0.5, 0.75, 1].map(stop)};
}

/** @param {Values} values @returns {Scale} */
export function scaleOf(name, values) {
  const about = NUMBERS[name];
  const known = /** @type {number[]} */ (values.filter((value) => Number.isFinite(value)));
  if (about.kind === "flag") return flags(about, known);
  if (about.kind === "which") return categories(known);
  return about.kind === "signed" ? signed(about, known) : sizes(about, known);
}

/** @param {{name: string, scale: Scale}} props */
export function Legend({name, scale}) {
  const {title, words} = NUMBERS[name];
  return html`<span class="legendline" title=${words}>
    <span class="muted">${title}: </span>
    ${scale.stops.map(([css, text]) => html`<span class=${`t ${css}`} key=${text}>${text}</span>`)}
  </span>`;
}

/**
 * Buttons of what tokens can be coloured by.
 * @param {{options: [string, string][], value: string, onChoose: any}} props
 */
export function ColourChoice({options, value, onChoose}) {
  const hinted = options.map(([key, text]) => [key, text, NUMBERS[key] && NUMBERS[key].words]);
  return html`<${Tabs} label="colour of the tokens" options=${hinted} value=${value} onChoose=${onChoose} />`;
}

// Return one number of a token as it is read, with its sign where it has one.
export function written(name, value) {
  const {kind, yes, no, unit} = NUMBERS[name];
  if (value === null || value === undefined) return "not known";
  if (kind === "flag") return value ? yes : no;
  return `${kind === "signed" && value > 0 ? "+" : ""}${number(value, 4)}${unit ? ` ${unit}` : ""}`;
}

/**
 * Return every number of a token: title, text, name.
 * @param {Numbers} numbers
 */
export function facts(numbers, i) {
  return present(numbers).map((name) => [NUMBERS[name].title, written(name, numbers[name][i]), name]);
}
