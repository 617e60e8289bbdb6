// Controls: choices, ticks, search, tabs, menus, copying. Those whose name begins with "Address" keep what is chosen
// under a key of the address; `resets` are further changes of the address, as the first page of a list.

import {useAddress} from "../lib/address.js";
import {copy, later} from "../lib/browser.js";
import {html, useEffect, useElement, useId, useMemo, useRef} from "../lib/html.js";
import {runName} from "../names.js";

// The value of a key of the address, and a function that sets it; the usual value is left out of the address.
function useKey(name, usual, resets = {}) {
  const {query, patch} = useAddress();
  const set = (value, options = {}) => patch({...resets, [name]: value === usual ? null : value}, options);
  return /** @type {const} */ ([query[name] || usual, set]);
}

// A choice of fewer than two options is not shown; a value that is none of the options stands behind them.
export function Choice({label, options, value, onChoose, class: name}) {
  const isKnown = !value || options.some(([key]) => String(key) === String(value));
  const all = isKnown ? options : [...options, [value, value]];
  const option = ([key, text]) =>
    html`<option key=${key} value=${key} selected=${String(key) === String(value)}>${text}</option>`;
  if (all.length < 2) return null;
  const change = (event) => onChoose(event.target.value);
  return html`<select class=${name} aria-label=${label} value=${value} onChange=${change}>
    ${all.map(option)}
  </select>`;
}

export function AddressChoice({name, options, usual = options[0] && options[0][0], resets, ...rest}) {
  const [value, choose] = useKey(name, usual, resets);
  return html`<${Choice} ...${rest} options=${options} value=${value} onChoose=${choose} />`;
}

// The choice of one of `runs`; `run` is the one in sight, which need not be the one that the address names.
export function RunChoice({label = "run", name = "run", runs, run, resets = {}}) {
  const {patch} = useAddress();
  const options = runs.map((each) => [each.place, runName(each)]);
  const choose = (value) => patch({...resets, [name]: value});
  return html`<${Choice} label=${label} options=${options} value=${run} onChoose=${choose} />`;
}

export function AddressTick({name, title, on = "1", resets, children}) {
  const [value, choose] = useKey(name, null, resets);
  const change = (event) => choose(event.target.checked ? on : null);
  return html`<label class="tick" title=${title}>
    <input type="checkbox" checked=${value === on} onChange=${change} />${children}
  </label>`;
}

// A text field that shows `value`, except while it has the focus: what is typed stays. `onEnter` gets the text when it
// was changed, or with `wait` so many ms after the last key. `options` are offered; further properties are the input's.
export function Field({label, value, onEnter, wait, options, wrong = false, class: name = "", ...attributes}) {
  const field = useElement();
  const list = useId();
  const newest = useRef(onEnter);
  newest.current = onEnter;
  const enter = useMemo(() => later((text) => newest.current(text), wait || 0), [wait]);
  useEffect(() => enter.stop, [enter]);
  useEffect(() => {
    if (document.activeElement !== field.current) field.current.value = value;
  }, [value]);
  const option = (each) => html`<option key=${each} value=${each} />`;
  const typed = (event) => enter(event.target.value);
  const changed = (event) => onEnter(event.target.value);
  const state = {
    ...{type: "text", "aria-label": label, list: options ? list : null, "aria-invalid": wrong ? "true" : null},
    ...(wait ? {onInput: typed} : {onChange: changed}),
  };
  return html`<input ref=${field} class=${name} ...${state} ...${attributes} />
    ${options && html`<datalist id=${list}>${options.map(option)}</datalist>`}`;
}

export function AddressField({name, resets, ...field}) {
  const [value, enter] = useKey(name, "", resets);
  return html`<${Field} wait=${200} ...${field} value=${value} onEnter=${(text) => enter(text, {replace: true})} />`;
}

export function AddressSearch({label, name = "q", ...field}) {
  return html`<${AddressField} type="search" name=${name} label=${label} placeholder=${label} ...${field} />`;
}

export function Tabs({label, options, value, onChoose}) {
  const option = ([key, text, hint]) =>
    button(text, () => onChoose(key), {key, title: hint, "aria-pressed": String(key === value)});
  return html`<div class="segments" role="group" aria-label=${label}>${options.map(option)}</div>`;
}

// A button that opens a list of actions: [text, action].
export function Menu({label, text, items}) {
  const details = useElement();
  const close = () => {
    details.current.open = false;
  };
  const leave = ({relatedTarget}) => details.current.contains(relatedTarget) || close();
  const choose = (run) => () => {
    close();
    run();
  };
  const item = ([name, run]) => button(name, choose(run), {key: name});
  return html`<details class="menu" ref=${details} onFocusOut=${leave}>
    <summary title=${label} aria-label=${label}>${text}</summary>
    <div>${items.map(item)}</div>
  </details>`;
}

export function Copyable({text, label, message, children}) {
  return html`<div class="toml">
    <pre tabindex="0" aria-label=${label}>${text}</pre>
    ${button("Copy", () => copy(text, message))}${children}
  </div>`;
}

/** Return a button; further attributes are those of its element. */
export const button = (content, onClick, attributes = {}) =>
  html`<button type="button" ...${attributes} onClick=${onClick}>${content}</button>`;

/** Return the attributes of a button that shows its words on pointing alone. */
export function stateOf(css, words, isPressed) {
  return {class: css, title: words, "aria-label": words, "aria-pressed": String(isPressed)};
}

/** Return a button of one sign; `label` names it. */
export const signButton = (sign, label, onPress, {hint = label, disabled = false} = {}) =>
  button(sign, onPress, {class: "bare", title: hint, "aria-label": label, disabled});
