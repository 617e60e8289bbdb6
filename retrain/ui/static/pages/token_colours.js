// Colours of sampled tokens: a span for each token with a class for its colour and its strength.

import {thousandths, tokensOf} from "./token_data.js";

/** @typedef {ReturnType<typeof import("./token_data.js").scalesOf>} Scales */

const MOST_SURPRISAL = 400; // hundredths of a nat

function strength(share) {
  return `h${Math.round(6 * Math.min(1, share))}`;
}

/**
 * Return the classes of a token.
 * @param {string} mode s: surprisal, a: advantage, p: planning, v: value
 * @param {import("./token_data.js").Tokens} tokens
 * @param {number} i
 * @param {Scales} scales
 */
function classOf(mode, {surprisal, advantage, planning, value}, i, {largest, low, high}) {
  if (mode === "s") return `su ${strength(surprisal[i] / MOST_SURPRISAL)}`;
  if (mode === "p") return planning && planning[i] ? "pl" : "";
  if (mode === "v") return value ? `va ${strength((value[i] - low) / (high - low || 1))}` : "";
  const amount = advantage ? advantage[i] : 0;
  // The root, so that small ones are seen beside the largest.
  const share = Math.max(1 / 6, Math.sqrt(Math.abs(amount) / largest));
  return amount ? `${amount > 0 ? "up" : "dn"} ${strength(share)}` : "";
}

/** @param {HTMLElement} element */
export function clear(element) {
  element.querySelectorAll("span.t").forEach((span) => span.replaceWith(...span.childNodes));
  element.normalize();
  delete element.dataset.shown;
}

/** @param {HTMLElement} element */
function textNodes(element) {
  const walk = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  /** @type {Text[]} */
  const nodes = [];
  while (walk.nextNode()) {
    const node = /** @type {Text} */ (walk.currentNode);
    if (node.parentElement && !node.parentElement.closest("summary")) nodes.push(node);
  }
  return nodes;
}

/**
 * Yield the parts of the text nodes that belong to one token: its index is null behind the last token.
 * @param {Text[]} nodes
 * @param {number[]} lengths
 */
function* parts(nodes, lengths) {
  let token = 0;
  let left = lengths[0] || 0;
  for (const node of nodes) {
    const characters = Array.from(node.data); // lengths count characters, not UTF-16 units
    for (let at = 0; at < characters.length;) {
      while (left === 0 && token < lengths.length) left = lengths[++token] || 0;
      const inside = token < lengths.length;
      const take = Math.min(inside ? left : Infinity, characters.length - at);
      yield {node, text: characters.slice(at, at + take).join(""), token: inside ? token : null};
      at += take;
      left -= inside ? take : 0;
    }
  }
}

/**
 * @param {HTMLElement} element
 * @param {string} mode
 * @param {Scales} scales
 */
export function colour(element, mode, scales) {
  if (element.dataset.l === undefined || element.dataset.shown === mode) return;
  clear(element);
  const tokens = tokensOf(element);
  /** @type {Map<Text, DocumentFragment>} */
  const replaced = new Map();
  for (const {node, text, token} of parts(textNodes(element), tokens.lengths)) {
    const fragment = replaced.get(node) || document.createDocumentFragment();
    replaced.set(node, fragment);
    fragment.append(token === null ? text : tokenSpan(classOf(mode, tokens, token, scales), text, token));
  }
  for (const [node, fragment] of replaced) node.replaceWith(fragment);
  element.dataset.shown = mode;
}

/** @param {number | null} token */
function tokenSpan(name, text, token = null) {
  const span = document.createElement("span");
  span.className = `t ${name}`;
  span.textContent = text;
  if (token !== null) span.dataset.i = String(token);
  return span;
}

/**
 * Return what a mode's colours mean: [classes, text] from low to high.
 * @param {string} mode
 * @param {Scales} scales
 * @returns {[string, string][]}
 */
function steps(mode, {largest, low, high}) {
  const signed = (share) => {
    const text = thousandths(share * largest, largest < 200 ? 3 : 2);
    return share > 0 ? `+${text}` : text;
  };
  const between = (share) => thousandths(low + share * (high - low), high - low < 200 ? 3 : 2);
  if (mode === "s") return ["0", "1", "2", "3", "≥ 4 nats"].map((text, i) => [`su h${[0, 2, 3, 5, 6][i]}`, text]);
  if (mode === "p") return [["pl", "planning token"]];
  if (mode === "v" && high > low)
    return [
      ["va h0", between(0)],
      ["va h3", between(0.5)],
      ["va h6", between(1)],
    ];
  if (mode === "v") return high === low ? [["", thousandths(low, 3)]] : [];
  if (!largest) return [["", "0"]];
  const down = [
    ["dn h6", signed(-1)],
    ["dn h3", signed(-0.25)],
  ];
  return /** @type {[string, string][]} */ ([...down, ["", "0"], ["up h3", signed(0.25)], ["up h6", signed(1)]]);
}

/** @param {Scales} scales */
export function legendOf(mode, scales) {
  return mode === "none" ? [] : steps(mode, scales).map(([name, text]) => tokenSpan(name, text));
}
