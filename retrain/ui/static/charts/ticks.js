// Where the ticks of an axis stand, and their texts.

import {count, duration, minus, niceStep, number, tickText} from "../format.js";

/** @type {Record<string, string>} */
export const X_TITLES = {
  step: "step",
  tokens: "tokens",
  device: "device-seconds",
  wall: "wall clock",
  rank: "rank kept",
};
/** @type {[string, string][]} */
export const X_CHOICES = ["step", "tokens", "device", "wall"].map((x) => [x, `over ${X_TITLES[x]}`]);

const MINUTE = 60;
const HOUR = 60 * MINUTE;
const DAY = 24 * HOUR;
const SECONDS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30];
const TIME_STEPS = [
  ...SECONDS,
  ...[1, 2, 5, 10, 15, 30].map((minutes) => minutes * MINUTE),
  ...[1, 2, 4, 6, 12].map((hours) => hours * HOUR),
  ...[1, 2, 7].map((days) => days * DAY),
];
const WHOLE_STEPS = Array.from({length: 16}, (_, power) => [1, 2, 5].map((factor) => factor * 10 ** power)).flat();

function isTime(kind) {
  return kind === "device" || kind === "wall";
}

// Return the steps that ticks of an x axis may have: steps, tokens and ranks are whole numbers.
export function xSteps(kind) {
  return isTime(kind) ? TIME_STEPS : WHOLE_STEPS;
}

export function xText(kind, value) {
  if (isTime(kind)) return duration(value);
  return kind === "tokens" ? count(value) : number(Math.round(value));
}

function exact(value) {
  return minus(String(Number(value.toPrecision(12))));
}

// Return the texts of ticks: all digits where the short texts repeat, and nothing for one that still repeats.
function distinct(ticks, short, long = exact) {
  const write = (text) => ticks.map((tick) => (tick === null ? "" : text(tick)));
  const texts = write(short);
  const known = texts.filter(Boolean);
  if (new Set(known).size === known.length) return texts;
  return write(long).map((text, i, all) => (all.indexOf(text) === i ? text : ""));
}

export function xTexts(kind, ticks) {
  const short = (value) => xText(kind, value);
  return distinct(ticks, short, isTime(kind) ? short : exact);
}

export function yTexts(ticks, step, unit) {
  const percent = unit === "%" || unit === "points";
  const long = (value) => exact(percent ? 100 * value : value) + (unit === "%" ? "%" : "");
  return distinct(ticks, (value) => tickText(value, step, unit), long);
}

// Return the ticks of a linear axis of a picture, about as many as wanted; `kind` names an x axis. With `isRound` the
// first and the last one enclose the values, else they lie within them.
export function linearTicks(low, high, wanted, kind = "", isRound = false) {
  const least = (high - low) / wanted || 1;
  const whole = kind && xSteps(kind).find((each) => each >= least * (1 - 1e-9));
  const step = whole || niceStep(least);
  const [first, last] = isRound
    ? [Math.floor(low / step + 1e-9), Math.ceil(high / step - 1e-9)]
    : [Math.ceil(low / step - 1e-9), Math.floor(high / step + 1e-9)];
  return {step, ticks: Array.from({length: Math.max(0, last - first + 1)}, (_, i) => (first + i) * step)};
}
