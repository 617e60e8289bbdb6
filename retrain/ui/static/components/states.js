// What a view shows where there is no data yet, none at all, or something to say about all of it.

import {html} from "../lib/html.js";

/** @param {{children?: any}} props */
export function Loading({children = "Reading …"}) {
  return html`<p class="state" role="status"><span class="spin" aria-hidden="true" />${children}</p>`;
}

/** @param {{title: string, children?: any}} props */
export function Empty({title, children}) {
  return html`<div class="state"><b>${title}</b>${children && html`<p>${children}</p>`}</div>`;
}

/** @param {{error: any, retry?: () => void}} props */
export function Failed({error, retry}) {
  const sentence = error && error.sentence;
  const message = `${(error && error.message) || error}. Is \`retrain ui\` still running?`;
  return html`<div class="state wrong" role="alert">
    <b>${sentence ? "This cannot be shown" : "The server does not answer"}</b>
    <p>${sentence || message}</p>
    ${retry && html`<button type="button" onClick=${retry}>Try again</button>`}
  </div>`;
}

/**
 * Shows an answer of `useAnswer`: what `children(data)` returns, or that it is loading or has failed. A failed refetch
 * of what is shown stands as a line above the old data.
 * @param {{of: import("../lib/answer.js").Answer, children: (data: any) => any}} props
 */
export function Answered({of, children}) {
  if (of.error && !of.isCurrent) return html`<${Failed} error=${of.error} retry=${of.retry} />`;
  if (of.data === null) return html`<${Loading} />`;
  const failed =
    of.error &&
    html`<${Banner} kind="down" title="Not up to date">
    ${of.error.sentence || of.error.message} <button type="button" onClick=${of.retry}>Try again</button>
  <//>`;
  return html`${failed}${children(of.data)}`;
}

/**
 * One message about the whole view. `kind` is up, down, unclear or "" (no judgement).
 * @param {{kind?: string, title: any, open?: boolean, children?: any, live?: boolean}} props
 */
export function Banner({kind = "", title, open = false, children, live = false}) {
  const name = ["banner", kind, open ? "open" : ""].filter(Boolean).join(" ");
  return html`<div class=${name} role=${live ? "status" : null}><b>${title}</b><div>${children}</div></div>`;
}

/** @param {{items?: string[]}} props */
export function NotRecorded({items}) {
  if (!items || !items.length) return null;
  const summary = `not recorded here: ${items.length === 1 ? "1 thing" : `${items.length} things`}`;
  return html`<details class="small muted missing">
    <summary>${summary}</summary>
    <ul>${items.map((text) => html`<li key=${text}>${text}</li>`)}</ul>
  </details>`;
}
