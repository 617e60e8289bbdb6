// @ts-nocheck
// Elements. Text only ever becomes text nodes; nothing here parses markup.

import {visible} from "./lib/html.js";

export {visible};
export {copy, download, later, say, spaced} from "./lib/browser.js";

const SVG = "http://www.w3.org/2000/svg";

function fill(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false || child === "") continue;
    element.append(child instanceof Node ? child : document.createTextNode(visible(child)));
  }
  return element;
}

function dress(element, props) {
  for (const [name, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, run] of Object.entries(value)) element.addEventListener(event, run);
    else if (name === "style") for (const [key, css] of Object.entries(value)) element.style.setProperty(key, css);
    else if (name === "class") element.setAttribute("class", value);
    else if (name === "value" || name === "checked" || name === "open" || name === "selected") element[name] = value;
    else element.setAttribute(name, value === true ? "" : visible(value));
  }
  return element;
}

// el("p", {class: "muted", on: {click}}, "text", node, [more]): a string is text, null and false are left out.
export function el(tag, props, ...children) {
  const element = document.createElement(tag);
  fill(element, children);
  return dress(element, props);
}

export function svg(tag, props, ...children) {
  const element = document.createElementNS(SVG, tag);
  fill(element, children);
  return dress(element, props);
}

export function put(element, ...children) {
  element.replaceChildren();
  return fill(element, children);
}

export function button(label, run, props) {
  return el("button", {type: "button", on: {click: run}, ...props}, label);
}

// A select with a visible or hidden label; options are [value, text].
export function choice(label, options, value, run, props) {
  const select = el("select", {...props, "aria-label": label, on: {change: () => run(select.value)}},
    options.map(([key, text]) => el("option", {value: key, selected: String(key) === String(value)}, text)));
  return select;
}

export function tick(label, on, run, props) {
  const box = el("input", {type: "checkbox", checked: on, on: {change: () => run(box.checked)}});
  return el("label", {class: "tick", ...props}, box, label);
}

// Puts what was drawn anew, and the focus back to the control of the same name.
export function keepingFocus(root, draw) {
  const active = document.activeElement;
  const inside = active && root.contains(active) && active !== root;
  const called = (each) => each.getAttribute("aria-label") || (each.closest("label") || each).textContent;
  const name = inside ? called(active) : null;
  const caret = inside && "selectionStart" in active ? active.selectionStart : null;
  draw();
  if (!inside || root.contains(document.activeElement)) return;
  const again = [...root.querySelectorAll("button, input, select, a, [role=button]")].find((each) => called(each) === name);
  if (!again) return;
  again.focus({preventScroll: true});
  if (caret !== null && again.setSelectionRange && /^(search|text)$/.test(again.type)) again.setSelectionRange(caret, caret);
}

// What a kind of directory does not hold: said once, opened by whom it concerns.
export function notRecorded(list) {
  return list && list.length ? el("details", {class: "small muted missing"}, el("summary", null, `not recorded here: ${list.length === 1 ? "1 thing" : `${list.length} things`}`),
    el("ul", null, list.map((text) => el("li", null, text)))) : null;
}

// -- the states of a page that has no data to show --------------------------------------------------------------

export function loading(words) {
  return el("p", {class: "state", role: "status"}, el("span", {class: "spin", "aria-hidden": "true"}), words || "Reading …");
}

export function nothing(head, ...words) {
  return el("div", {class: "state"}, el("b", null, head), words.map((text) => el("p", null, text)));
}

export function failed(error, retry) {
  const known = error && error.sentence;
  return el("div", {class: "state wrong", role: "alert"}, el("b", null, known ? "This cannot be shown" : "The server does not answer"),
    el("p", null, known ? error.sentence : `${error && error.message || error}. Is \`retrain ui\` still running?`),
    retry ? button("Try again", retry) : null);
}
