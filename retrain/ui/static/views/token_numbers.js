// @ts-nocheck
// What a token can be coloured by, and how: a scale from numbers to classes with its legend; and all numbers in words.

import {el} from "../dom.js";
import {count, number, plural} from "../format.js";

const LEVELS = 6;

// In the order of the key c. kind: size (0 … cap), signed (−cap … cap), range (low … high), flag, or which (categories).
export const NUMBERS = {
  surprisal: {title: "surprisal", kind: "size", cap: 4, unit: "nats", words: "−log of the probability with which the token was sampled"},
  entropy: {title: "entropy", kind: "size", cap: 2, unit: "nats", words: "entropy of the distribution that the token was drawn from"},
  advantage: {title: "advantage", kind: "signed", floor: 1e-6, words: "the advantage that the token trains with"},
  credit: {title: "credit change", kind: "signed", floor: 1e-4, words: "the token's advantage minus that of its rollout or turn: what the credit assignment did"},
  mismatch: {title: "mismatch", kind: "signed", floor: 0.02, unit: "nats", words: "log-probability under the trainer minus under the sampler"},
  planning: {title: "planning", kind: "flag", yes: "planning token", no: "other token", words: "tokens that were taken for planning"},
  trained: {title: "trained", kind: "flag", yes: "trained on", no: "masked out", words: "tokens that count in the loss"},
  version: {title: "version", kind: "which", words: "version of the weights that sampled the token"},
  value: {title: "value", kind: "range", words: "what the critic expected from here on"},
  target: {title: "value target", kind: "range", words: "what the critic was taught to expect"},
};

// Those that these numbers hold.
export function present(numbers) {
  return Object.keys(NUMBERS).filter((name) => Array.isArray(numbers[name]) && numbers[name].some((value) => value !== null));
}

// Differences of float32 numbers that are no more than rounding are 0.
export function cleaned(numbers) {
  const out = {...numbers};
  for (const name of ["credit", "mismatch"]) if (out[name]) out[name] = out[name].map((value) => (value !== null && Math.abs(value) < 2e-6 ? 0 : value));
  return out;
}

function known(values) {
  return values.filter((value) => value !== null && value !== undefined && Number.isFinite(value));
}

// A round number, at least this.
function round(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 3, 4, 5, 6, 8, 10].map((factor) => factor * power).find((each) => each >= value * (1 - 1e-9));
}

// Where the strongest colour begins: what 98 of 100 values stay below, so that a single one does not pale the others.
function capOf(values, floor) {
  const sizes = values.map(Math.abs).filter((size) => size > 0).sort((a, b) => a - b);
  const high = sizes.length ? sizes[Math.floor(0.98 * (sizes.length - 1))] : 0;
  return round(Math.max(high, floor || 1e-6));
}

function level(share) {
  return Math.max(1, Math.min(LEVELS, Math.ceil(LEVELS * share - 1e-9)));
}

// {css(value) → class, stops: [[class, text]], domain: [low, high]} for a number over these values (null: not known).
export function scaleOf(name, values) {
  const about = NUMBERS[name], there = known(values);
  const unit = about.unit ? ` ${about.unit}` : "";
  if (about.kind === "flag") {
    const yes = there.filter((value) => value).length;
    return {css: (value) => (value === null || value === undefined ? "" : value ? "yes" : "no"), domain: [0, 1],
      stops: [["yes", `${about.yes}: ${count(yes)}`], ["no", `${about.no}: ${count(there.length - yes)}`]]};
  }
  if (about.kind === "which") {
    const all = [...new Set(there)].sort((a, b) => a - b);
    const css = (value) => (value === null || value === undefined ? "" : `w${all.indexOf(value) % 8 + 1}`);
    return {css, domain: [all[0] ?? 0, all[all.length - 1] ?? 1], stops: all.slice(-12).map((value) => [css(value), `${value}: ${plural(there.filter((each) => each === value).length, "token")}`])};
  }
  if (about.kind === "signed") {
    const cap = capOf(there, about.floor);
    const css = (value) => (!value || Math.abs(value) < cap / 1e4 ? "" : `${value > 0 ? "p" : "m"}${level(Math.abs(value) / cap)}`);
    const stop = (share) => [css(share * cap), `${Math.abs(share) === 1 ? (share > 0 ? "≥ " : "≤ ") : ""}${share > 0 ? "+" : ""}${number(share * cap)}${Math.abs(share) === 1 ? unit : ""}`];
    return {css, domain: [-cap, cap], stops: [stop(-1), stop(-0.5), ["", "0"], stop(0.5), stop(1)]};
  }
  const low = about.kind === "size" ? 0 : Math.min(...(there.length ? there : [0])), high = about.kind === "size" ? about.cap : Math.max(...(there.length ? there : [1]));
  const css = (value) => { const share = value === null || value === undefined ? 0 : (value - low) / (high - low || 1); return share < 0.02 ? "" : `s${level(share)}`; };
  const stop = (share) => [css(low + share * (high - low)), `${share === 1 && about.kind === "size" ? "≥ " : ""}${number(low + share * (high - low))}${share === 1 ? unit : ""}`];
  return {css, domain: [low, high], stops: [0, 0.25, 0.5, 0.75, 1].map(stop)};
}

export function legend(name, scale) {
  return el("span", {class: "legendline", title: NUMBERS[name].words}, el("span", {class: "muted"}, `${NUMBERS[name].title}: `),
    scale.stops.map(([css, text]) => el("span", {class: `t ${css}`}, text)));
}

// One number of a token as it is read: with its sign where it has one.
export function written(name, value) {
  const {kind, yes, no, unit} = NUMBERS[name];
  if (value === null || value === undefined) return "not known";
  if (kind === "flag") return value ? yes : no;
  return `${kind === "signed" && value > 0 ? "+" : ""}${number(value, 4)}${unit ? ` ${unit}` : ""}`;
}

// All numbers of a token: [[title, text, name]].
export function facts(numbers, i) {
  return present(numbers).map((name) => [NUMBERS[name].title, written(name, numbers[name][i]), name]);
}
