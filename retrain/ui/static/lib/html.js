// Elements for components: `html` (htm over Preact) and the hooks. Text from anywhere becomes text nodes only.

import {createContext, h, options, render} from "../vendor/preact/preact.module.js";
import {useRef} from "../vendor/preact/hooks.module.js";
import htm from "../vendor/htm/htm.module.js";

export {createContext, h, render};
export {useCallback, useContext, useEffect, useErrorBoundary, useId} from "../vendor/preact/hooks.module.js";
export {useLayoutEffect, useMemo, useRef, useState} from "../vendor/preact/hooks.module.js";

/** @type {(strings: TemplateStringsArray, ...values: any[]) => any} */
export const html = htm.bind(h);

/** Return a ref for an element. @returns {{current: any}} */
export const useElement = () => useRef(null);

// Controls, soft hyphens, direction marks and other characters that act or hide.
const INVISIBLE = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u180e\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f" +
    "\\u3164\\ufdd0-\\ufdef\\ufeff\\ufffe\\uffff]|\\udb40[\\udc00-\\udc7f]|[\\ud800-\\udbff](?![\\udc00-\\udfff])|" +
    "(?<![\\ud800-\\udbff])[\\udc00-\\udfff]",
  "g",
);

function mark(c) {
  if (c < " ") return String.fromCharCode(0x2400 + c.charCodeAt(0));
  return c === "\u007f" ? "\u2421" : "\ufffd";
}

// Return the text with one visible mark for each invisible or control character.
export function visible(text) {
  return String(text).replace(INVISIBLE, mark);
}

// What a user typed or chose must reach the control unchanged.
const UNCHANGED = new Set(["children", "value", "defaultValue", "key"]);
const SAFE_LINK = /^(?:[/#?.]|https?:|blob:|data:image\/)/i;

function sanitize(props) {
  if ("dangerouslySetInnerHTML" in props || "innerHTML" in props) throw new Error("markup is never parsed here");
  for (const [name, value] of Object.entries(props)) {
    if (typeof value !== "string" || UNCHANGED.has(name)) continue;
    if (name === "href" || name === "src") props[name] = SAFE_LINK.test(value) ? value : "#";
    else props[name] = visible(value);
  }
}

const before = options.vnode;
options.vnode = (vnode) => {
  const node = /** @type {any} */ (vnode);
  if (node.type === null && typeof node.props === "string") node.props = visible(node.props);
  else if (typeof node.type === "string") sanitize(node.props);
  if (before) before(vnode);
};
