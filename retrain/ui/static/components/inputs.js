// Controls: choices, ticks, search, tabs, menus, copying.

import {copy, later} from "../lib/browser.js";
import {html, useEffect, useMemo, useRef} from "../lib/html.js";

/** @typedef {[value: string, text: string]} Option */

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
 * A search field. `onSearch` is called a moment after the last key; while it has the focus, what is typed stays.
 * @param {{label: string, value: string, onSearch: (text: string) => void, wait?: number, wrong?: boolean}} props
 */
export function SearchField({label, value, onSearch, wait = 200, wrong = false}) {
  const field = useRef(/** @type {HTMLInputElement | null} */ (null));
  const newest = useRef(onSearch);
  newest.current = onSearch;
  const search = useMemo(() => later((text) => newest.current(text), wait), [wait]);
  useEffect(() => search.stop, [search]);
  useEffect(() => {
    if (field.current && document.activeElement !== field.current) field.current.value = value;
  }, [value]);
  return html`<input
    ref=${field}
    type="search"
    class=${wrong ? "wrong" : null}
    aria-invalid=${wrong ? "true" : null}
    placeholder=${label}
    aria-label=${label}
    onInput=${(event) => search(event.target.value)}
  />`;
}

/**
 * Buttons of which one is pressed.
 * @param {{label: string, options: Option[], value: string, onChoose: (value: string) => void}} props
 */
export function Tabs({label, options, value, onChoose}) {
  const button = ([key, text]) =>
    html`<button
      type="button"
      key=${key}
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

/** @param {{text: string, message?: string, children?: any}} props */
export function CopyButton({text, message, children = "Copy"}) {
  return html`<button type="button" onClick=${() => copy(text, message)}>${children}</button>`;
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
