// The title of a view, and what it shows where there is no data yet, none at all, or something to say about all of it.

import {html} from "../lib/html.js";
import {plural} from "../format.js";
import {button} from "./inputs.js";

export function Title({title, words = "", children = null}) {
  return html`<div class="title"><h1>${title}</h1><p class="muted">${words}</p>${children}</div>`;
}

// The head of something that is opened beside or above the rest.
export function ClosableHead({title, words = "", id = null, onClose}) {
  return html`<div class="head">
    <h2 id=${id}>${title}${words && html`<small>${words}</small>`}</h2>
    ${button("Close", onClose)}
  </div>`;
}

export function Loading({children = "Reading …"}) {
  return html`<p class="state" role="status"><span class="spin" aria-hidden="true" />${children}</p>`;
}

export function Empty({title, children}) {
  return html`<div class="state"><b>${title}</b>${children && html`<p>${children}</p>`}</div>`;
}

export function Failed({error, retry = null}) {
  const sentence = error && error.sentence;
  const message = `${(error && error.message) || error}. Is \`retrain ui\` still running?`;
  return html`<div class="state wrong" role="alert">
    <b>${sentence ? "This cannot be shown" : "The server does not answer"}</b>
    <p>${sentence || message}</p>
    ${retry && button("Try again", retry)}
  </div>`;
}

// Shows an answer of `useAnswer`: what `children(data)` returns, or that it is loading or has failed. A failed refetch
// of what is shown stands as a line above the old data.
export function Answered({of, children}) {
  if (of.error && !of.isCurrent) return html`<${Failed} error=${of.error} retry=${of.retry} />`;
  if (of.data === null) return html`<${Loading} />`;
  const words = of.error && html`${of.error.message} ${button("Try again", of.retry)}`;
  return html`${words && html`<${Banner} kind="down" title="Not up to date">${words}<//>`}${children(of.data)}`;
}

// One message about the whole view. `kind` is up, down, unclear or "" (no judgement); hatched where it is `open`.
export function Banner({kind = "", title, open = false, children}) {
  return html`<div class=${`banner ${kind} ${open ? "open" : ""}`}><b>${title}</b><div>${children}</div></div>`;
}

export function NotRecorded({items}) {
  if (!items || !items.length) return null;
  return html`<details class="small muted missing">
    <summary>not recorded here: ${plural(items.length, "thing")}</summary>
    <ul>${items.map((text) => html`<li key=${text}>${text}</li>`)}</ul>
  </details>`;
}
