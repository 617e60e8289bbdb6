// The numbers of sampled tokens, which stand in attributes of the texts as lists of integers.

/**
 * @typedef {object} Tokens
 * @property {number[]} lengths in characters
 * @property {number[]} surprisal in hundredths of a nat
 * @property {number[] | null} advantage in thousandths
 * @property {boolean[] | null} planning
 * @property {number[] | null} value in thousandths
 * @property {number[] | null} target of the value
 */

/** @type {Map<HTMLElement, Tokens>} */
const known = new Map();

const DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/**
 * Return integers from base-64 VLQ: digits of five bits, the lowest first, all but the last marked by 32; the lowest
 * bit of all is the sign.
 * @param {string | undefined} text
 */
function numbers(text = "") {
  /** @type {number[]} */
  const found = [];
  let sum = 0;
  let scale = 1; // Shifts would end at 32 bits.
  for (const digit of text) {
    const bits = DIGITS.indexOf(digit);
    sum += (bits % 32) * scale;
    scale *= 32;
    if (bits < 32) {
      found.push(sum % 2 ? (1 - sum) / 2 : sum / 2);
      sum = 0;
      scale = 1;
    }
  }
  return found;
}

// Return the mask of its run lengths, of which the first is of false.
function mask(runs) {
  return runs.flatMap((length, i) => Array(length).fill(i % 2 === 1));
}

/**
 * @param {HTMLElement} element
 * @returns {Tokens}
 */
export function tokensOf(element) {
  const {l, s, a, p, v, t} = element.dataset;
  const optional = (text) => (text === undefined ? null : numbers(text));
  const tokens = known.get(element) || {
    lengths: numbers(l),
    surprisal: numbers(s),
    advantage: optional(a),
    planning: p === undefined ? null : mask(numbers(p)),
    value: optional(v),
    target: optional(t),
  };
  known.set(element, tokens);
  return tokens;
}

/**
 * Return the largest advantage of either sign, and the least and the largest value, over all texts.
 * @param {HTMLElement[]} elements
 */
export function scalesOf(elements) {
  const scales = {largest: 0, low: Infinity, high: -Infinity};
  for (const element of elements) {
    const {advantage, value} = tokensOf(element);
    for (const each of advantage || []) scales.largest = Math.max(scales.largest, Math.abs(each));
    for (const each of value || []) {
      scales.low = Math.min(scales.low, each);
      scales.high = Math.max(scales.high, each);
    }
  }
  return scales;
}

export function thousandths(value, digits) {
  return (value / 1000).toFixed(digits).replace("-", "−");
}

// Return what is known of a token, as one line.
export function describe(element, text, i) {
  const {surprisal, advantage, planning, value, target} = tokensOf(element);
  const parts = [JSON.stringify(text), `token ${i}`, `surprisal ${(surprisal[i] / 100).toFixed(2)}`];
  if (advantage) parts.push(`advantage ${thousandths(advantage[i], 3)}`);
  const aim = target ? ` (target ${thousandths(target[i], 3)})` : "";
  if (value) parts.push(`V ${thousandths(value[i], 3)}${aim}`);
  if (planning && planning[i]) parts.push("planning");
  return parts.join(" · ");
}
