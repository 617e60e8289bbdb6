// What a token can be coloured by: a scale from numbers to classes of tokens.css, and every number in words.

import {count, extent, number, plural} from "../format.js";

const LEVELS = 6;
const CATEGORIES = 8;

/** @typedef {{css: (value: number | null) => string, stops: string[][]}} Scale of stops [css, text] */

// Kinds: size (0 to `cap`), signed (−cap to cap, which is at least `floor`), range (least to greatest), flag (`yes` or
// `no`), which (categories).
/** @type {Record<string, any>} */
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

// Return the least round number that is not below this.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * ([1, 2, 3, 4, 5, 6, 8].find((factor) => factor * power >= value * (1 - 1e-9)) || 10);
}

// The strongest colour begins where 98 of 100 values stay below, so that a single one does not pale the others.
function capOf(known, floor = 1e-6) {
  const sizes = known.map(Math.abs).filter((size) => size > 0);
  sizes.sort((a, b) => a - b);
  return sizes.length ? roundUp(Math.max(sizes[Math.floor(0.98 * (sizes.length - 1))], floor)) : 0;
}

function level(share) {
  return Math.max(1, Math.min(LEVELS, Math.ceil(LEVELS * share - 1e-9)));
}

/** @type {Record<string, (known: number[], about: any) => Scale>} */
const SCALES = {
  flag(known, {yes, no}) {
    const many = known.filter((value) => value).length;
    const words = {yes: `${yes}: ${count(many)}`, no: `${no}: ${count(known.length - many)}`};
    return {css: (value) => (value ? "yes" : "no"), stops: Object.entries(words)};
  },
  which(known) {
    const all = [...new Set(known)].sort((a, b) => a - b);
    const css = (value) => `w${(all.indexOf(value) % CATEGORIES) + 1}`;
    const many = (value) => plural(known.filter((each) => each === value).length, "token");
    return {css, stops: all.slice(-12).map((value) => [css(value), `${value}: ${many(value)}`])};
  },
  signed(known, {floor, unit = ""}) {
    const cap = capOf(known, floor);
    const css = (value) =>
      Math.abs(value) <= cap / 1e4 ? "" : `${value > 0 ? "p" : "m"}${level(Math.abs(value) / cap)}`;
    const stop = (share) => {
      const sign = {1: "≥ ", "-1": "≤ "}[share] || "";
      const end = sign && unit && ` ${unit}`;
      return [css(share * cap), `${sign}${signedText(share * cap)}${end}`];
    };
    return {css, stops: (cap ? [-1, -0.5, 0, 0.5, 1] : [0]).map(stop)};
  },
  size(known, {cap = 1, unit}) {
    return between(0, cap, (share, text) => (share === 1 ? `≥ ${text} ${unit}` : text));
  },
  range(known) {
    const [low, high] = extent(known) || [0, 1];
    return between(low, high, (share, text) => text);
  },
};

/** @returns {Scale} */
function between(low, high, write) {
  const css = (value) => {
    const share = (value - low) / (high - low || 1);
    return share < 0.02 ? "" : `s${level(share)}`;
  };
  const stop = (share) => {
    const at = low + share * (high - low);
    return [css(at), write(share, number(at))];
  };
  return {css, stops: (high > low ? [0, 0.25, 0.5, 0.75, 1] : [0]).map(stop)};
}

/** Return the scale of the tokens' values (null: not known) of one of NUMBERS. @returns {Scale} */
export function scaleOf(name, values) {
  const {css, stops} = SCALES[NUMBERS[name].kind](values.filter(Number.isFinite), NUMBERS[name]);
  return {css: (value) => (value === null || value === undefined ? "" : css(value)), stops};
}

function signedText(value, digits = 3) {
  return `${value > 0 ? "+" : ""}${number(value, digits)}`;
}

/** Return one number of a token as it is read, with its sign where it has one. */
export function valueText(name, value) {
  const {kind, yes, no, unit} = NUMBERS[name];
  if (value === null || value === undefined) return "not known";
  if (kind === "flag") return value ? yes : no;
  return (kind === "signed" ? signedText(value, 4) : number(value, 4)) + (unit ? ` ${unit}` : "");
}

export function facts(numbers, i) {
  return Object.keys(numbers).map((name) => [NUMBERS[name].title, valueText(name, numbers[name][i]), name]);
}
