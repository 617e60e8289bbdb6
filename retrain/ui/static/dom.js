// Elements. Text only ever becomes text nodes; nothing here parses markup.

const SVG = "http://www.w3.org/2000/svg";

// Controls, soft hyphens, direction marks and other characters that act or hide: one visible mark each, as in reports.
const UNSEEN = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u180e\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f" +
  "\\u3164\\ufdd0-\\ufdef\\ufeff\\ufffe\\uffff]|\\udb40[\\udc00-\\udc7f]|[\\ud800-\\udbff](?![\\udc00-\\udfff])|" +
  "(?<![\\ud800-\\udbff])[\\udc00-\\udfff]", "g");

export function visible(text) {
  return String(text).replace(UNSEEN, (c) => c < " " ? String.fromCharCode(0x2400 + c.charCodeAt(0)) : c === "\u007f" ? "\u2421" : "\ufffd");
}

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

// Runs `run` once things have been quiet for `wait` ms.
export function later(run, wait) {
  let timer = 0;
  const call = (...values) => { clearTimeout(timer); timer = setTimeout(() => run(...values), wait); };
  call.stop = () => clearTimeout(timer);
  return call;
}

// Runs `run` at most once in `wait` ms (a number or a function), the last call included: for events that come faster
// than one wants to read.
export function spaced(run, wait) {
  let timer = 0, before = -Infinity;
  const call = () => {
    if (timer) return;
    timer = setTimeout(() => { timer = 0; before = performance.now(); run(); }, Math.max(120, before + (typeof wait === "function" ? wait() : wait) - performance.now()));
  };
  call.stop = () => { clearTimeout(timer); timer = 0; };
  return call;
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

// Gives a file to the browser to save.
export function download(name, blob) {
  const url = URL.createObjectURL(blob);
  el("a", {href: url, download: name}).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

export function say(text) {
  const toast = document.getElementById("toast");
  toast.textContent = visible(text);
  toast.classList.add("on");
  clearTimeout(say.timer);
  say.timer = setTimeout(() => toast.classList.remove("on"), 2400);
}

export async function copy(text, words) {
  try {
    await navigator.clipboard.writeText(text);
    say(words || "Copied");
  } catch (error) {
    const area = el("textarea", {class: "away", "aria-hidden": "true"});
    area.value = text;
    document.body.append(area);
    area.select();
    say(document.execCommand("copy") ? words || "Copied" : "The browser does not allow copying");
    area.remove();
  }
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
