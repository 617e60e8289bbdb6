// Controls: choices, ticks, search, tabs, menus, copying.

import {copy, later} from "../lib/browser.js";
import {html, useEffect, useId, useMemo, useRef} from "../lib/html.js";

/** @typedef {[value: string, text: string, hint?: string]} Option the hint is of a button */

/** @param {{label: string, options: Option[], value: string, onChoose: (key: string) => void, class?: string}} props */
export function Choice({label, options, value, onChoose, class: name}) {
  return html`<select
    class=${name}
    aria-label=${label}
    value=${value}
    onChange=${(event) => onChoose(event.target.value)}
  >
    ${options.map(
      ([key, text]) =>
        html`<option key=${key} value=${key} selected=${String(key) === String(value)}>${text}</option>`,
    )}
  </select>`;
}

/** @param {{checked: boolean, onChoose: (checked: boolean) => void, title?: string, children?: any}} props */
export function Tick({checked, onChoose, title, children}) {
  const change = (event) => onChoose(event.target.checked);
  return html`<label class="tick" title=${title}>
    <input type="checkbox" checked=${checked} onChange=${change} />${children}
  </label>`;
}

/**
 * A text field that shows `value`, except while it has the focus: what is typed stays. `onEnter` gets the text when it
 * was changed, or with `wait` so many ms after the last key. `options` are offered; further properties are the input's.
 * @param {{label: string, value: string, onEnter: (text: string) => void, wait?: number, options?: string[],
 *   wrong?: boolean, class?: string, [attribute: string]: any}} props
 */
export function Field({label, value, onEnter, wait, options, wrong = false, class: name = "", ...attributes}) {
  const field = useRef(/** @type {HTMLInputElement | null} */ (null));
  const list = useId();
  const newest = useRef(onEnter);
  newest.current = onEnter;
  const enter = useMemo(() => later((text) => newest.current(text), wait || 0), [wait]);
  useEffect(() => enter.stop, [enter]);
  useEffect(() => {
    if (field.current && document.activeElement !== field.current) field.current.value = value;
  }, [value]);
  const option = (each) => html`<option key=${each} value=${each} />`;
  const typed = (event) => enter(event.target.value);
  const changed = (event) => onEnter(event.target.value);
  return html`<input
      ref=${field}
      type="text"
      class=${[name, wrong && "wrong"].filter(Boolean).join(" ") || null}
      aria-label=${label}
      aria-invalid=${wrong ? "true" : null}
      list=${options ? list : null}
      ...${wait ? {onInput: typed} : {onChange: changed}}
      ...${attributes}
    />
    ${options && html`<datalist id=${list}>${options.map(option)}</datalist>`}`;
}

/** @param {{label: string, value: string, onSearch: (text: string) => void, wait?: number, wrong?: boolean}} props */
export function SearchField({onSearch, wait = 200, ...field}) {
  return html`<${Field} type="search" placeholder=${field.label} wait=${wait} onEnter=${onSearch} ...${field} />`;
}

/**
 * Buttons of which one is pressed.
 * @param {{label: string, options: Option[], value: string, onChoose: (value: string) => void}} props
 */
export function Tabs({label, options, value, onChoose}) {
  const button = (/** @type {Option} */ [key, text, hint]) =>
    html`<button
      type="button"
      key=${key}
      title=${hint}
      aria-pressed=${key === value ? "true" : "false"}
      onClick=${() => onChoose(key)}
    >
      ${text}
    </button>`;
  return html`<div class="segments" role="group" aria-label=${label}>${options.map(button)}</div>`;
}

/**
 * A button that opens a list of actions.
 * @param {{label: string, text: any, items: [text: string, run: () => void][]}} props
 */
export function Menu({label, text, items}) {
  const details = useRef(/** @type {HTMLDetailsElement | null} */ (null));
  const close = () => {
    if (details.current) details.current.open = false;
  };
  const leave = (event) => {
    if (details.current && !details.current.contains(/** @type {Node | null} */ (event.relatedTarget))) close();
  };
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

/**
 * A text in full, with a button that copies it.
 * @param {{text: string, label: string, message: string, children?: any}} props
 */
export function Copyable({text, label, message, children}) {
  return html`<div class="toml">
    <pre tabindex="0" aria-label=${label}>${text}</pre>
    <button type="button" onClick=${() => copy(text, message)}>Copy</button>${children}
  </div>`;
}

/**
 * A button of one sign; `label` names it.
 * @param {{label: string, hint?: string, onPress: () => void, disabled?: boolean, children?: any}} props
 */
export function SignButton({label, hint, onPress, disabled, children}) {
  return html`<button
    type="button"
    class="bare"
    title=${hint || label}
    aria-label=${label}
    disabled=${disabled}
    onClick=${onPress}
  >
    ${children}
  </button>`;
}
