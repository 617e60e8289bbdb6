// The tokens of a page's texts: their numbers stand in attributes as lists of integers, their colours in spans that are
// made on demand.

/** @type {Map<HTMLElement, {lengths: number[], numbers: Record<string, number[]>}>} lengths in characters */
const known = new Map();

const DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
/** Attributes with numbers, and by what they are multiplied. @type {[string, string, number][]} */
const ATTRIBUTES = [
  ["s", "surprisal", 100],
  ["a", "advantage", 1000],
  ["v", "value", 1000],
  ["t", "target", 1000],
];

// Return integers from base-64 VLQ: digits of five bits, the lowest first, all but the last marked by 32; the lowest
// bit of all is the sign.
function integers(text) {
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

// Return the lengths of an element's tokens, and their numbers by their names in NUMBERS.
export function tokensOf(element) {
  const {l = "", p, ...data} = element.dataset;
  let tokens = known.get(element);
  if (tokens) return tokens;
  tokens = {lengths: integers(l), numbers: {}};
  for (const [letter, name, times] of ATTRIBUTES) {
    const text = data[letter];
    if (text !== undefined) tokens.numbers[name] = integers(text).map((value) => value / times);
  }
  // A mask by its run lengths, of which the first is of false.
  if (p !== undefined) tokens.numbers.planning = integers(p).flatMap((length, i) => Array(length).fill(i % 2));
  known.set(element, tokens);
  return tokens;
}

export function clear(element) {
  element.querySelectorAll("span.t").forEach((span) => span.replaceWith(...span.childNodes));
  element.normalize();
  delete element.dataset.shown;
}

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

// Yield the parts of the text nodes that belong to one token: its index is null behind the last token.
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

export function colour(element, name, scale) {
  const {lengths, numbers} = tokensOf(element);
  if (!lengths.length || element.dataset.shown === name) return;
  clear(element);
  /** @type {Map<Text, DocumentFragment>} */
  const replaced = new Map();
  for (const {node, text, token} of parts(textNodes(element), lengths)) {
    const fragment = replaced.get(node) || document.createDocumentFragment();
    replaced.set(node, fragment);
    fragment.append(token === null ? text : tokenSpan(scale.css((numbers[name] || [])[token]), text, token));
  }
  for (const [node, fragment] of replaced) node.replaceWith(fragment);
  element.dataset.shown = name;
}

export function tokenSpan(css, text, /** @type {number | null} */ token = null) {
  const span = document.createElement("span");
  span.className = `t ${css}`;
  span.textContent = text;
  if (token !== null) span.dataset.i = String(token);
  return span;
}
