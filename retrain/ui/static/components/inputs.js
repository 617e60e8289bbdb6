// Controls: choices, ticks, search, tabs, menus, copying. Those whose name begins with "Address" keep what is chosen
// under a key of the address; `resets` are further changes of the address, as the first page of a list.

import {useAddress} from "../lib/address.js";
import {copy, later} from "../lib/browser.js";
import {html, useEffect, useElement, useId, useMemo, useRef} from "../lib/html.js";
import {runName} from "../names.js";

/** @typedef {[value: string, text: string, hint?: string]} Option the hint is of a button */

/**
 * Return the value of a key of the address, and a function that sets it; the usual value is left out of the address.
 * @returns {[any, (value: any, options?: {replace?: boolean}) => void]}
 */
function useKey(name, usual, resets = {}) {
  const {query, patch} = useAddress();
  return [
    query[name] || usual,
    (value, options) => patch({...resets, [name]: value === usual ? null : value}, options),
  ];
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
  const looks = {
    class: [name, wrong && "wrong"].filter(Boolean).join(" ") || null,
    "aria-invalid": wrong ? "true" : null,
  };
  const events = wait ? {onInput: typed} : {onChange: changed};
  return html`<input ref=${field} type="text" aria-label=${label} list=${options ? list : null} ...${looks} ...${events}
      ...${attributes} />
    ${options && html`<datalist id=${list}>${options.map(option)}</datalist>`}`;
}

export function AddressField({name, resets, ...field}) {
  const [value, enter] = useKey(name, "", resets);
  return html`<${Field} wait=${200} ...${field} value=${value} onEnter=${(text) => enter(text, {replace: true})} />`;
}

export function AddressSearch({label, name = "q", ...field}) {
  return html`<${AddressField} type="search" name=${name} label=${label} placeholder=${label} ...${field} />`;
}

// Buttons of which one is pressed.
export function Tabs({label, options, value, onChoose}) {
  const button = (/** @type {Option} */ [key, text, hint]) => {
    const state = {title: hint, "aria-pressed": String(key === value)};
    return html`<button type="button" key=${key} ...${state} onClick=${() => onChoose(key)}>${text}</button>`;
  };
  return html`<div class="segments" role="group" aria-label=${label}>${options.map(button)}</div>`;
}

export function AddressTabs({name, options, ...rest}) {
  const [value, choose] = useKey(name, options[0][0]);
  return html`<${Tabs} ...${rest} options=${options} value=${value} onChoose=${choose} />`;
}

// A button that opens a list of actions: [text, action].
export function Menu({label, text, items}) {
  const details = useElement();
  const close = () => {
    details.current.open = false;
  };
  const leave = ({relatedTarget}) => details.current.contains(relatedTarget) || close();
  const item = ([name, run]) => {
    const choose = () => {
      close();
      run();
    };
    return html`<button type="button" key=${name} onClick=${choose}>${name}</button>`;
  };
  return html`<details class="menu" ref=${details} onFocusOut=${leave}>
    <summary title=${label} aria-label=${label}>${text}</summary>
    <div>${items.map(item)}</div>
  </details>`;
}

// A text in full, with a button that copies it.
export function Copyable({text, label, message, children}) {
  return html`<div class="toml">
    <pre tabindex="0" aria-label=${label}>${text}</pre>
    <button type="button" onClick=${() => copy(text, message)}>Copy</button>${children}
  </div>`;
}

/** Return a button of one sign; `label` names it. */
export function signButton(sign, label, onPress, {hint = label, disabled = false} = {}) {
  const attributes = {type: "button", class: "bare", title: hint, "aria-label": label, disabled};
  return html`<button ...${attributes} onClick=${onPress}>${sign}</button>`;
}
