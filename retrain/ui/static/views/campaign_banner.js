// The result of a campaign: one banner with state, failures, the command that continues it and then the verdicts, each
// in a sentence; below it the caveats.

import {Copyable} from "../components/inputs.js";
import {Banner} from "../components/states.js";
import {plural} from "../format.js";
import {html} from "../lib/html.js";
import {link} from "../lib/address.js";
import {classOf, isOpen} from "../components/interval_bar.js";

const ONE_CONDITION = "One condition only: there is nothing to compare it with.";
const NOTHING = "No two conditions have a finished run with a value.";

// `body`: the answer of /api/campaign.
export function Outcome({body: {banner, comparison, summary}}) {
  const {failed, resume, state} = banner;
  const first = summary.verdict;
  const unfinished = ["interrupted", "stopped"].includes(state) ? "unclear" : "";
  const kind = failed.length ? "down" : unfinished || (first ? classOf(first.word) : "");
  const title = html`<span class=${`pill flush ${state}`}>${state}</span> ${banner.words}`;
  const others = comparison && first ? comparison.conditions.slice(1).filter(({label}) => label !== first.label) : [];
  const verdict = (label, word, sentence) =>
    html`<p class=${`outcome ${classOf(word)}`} key=${label}><b>${word}</b> ${sentence}</p>`;
  const why = html`<p class="muted">${banner.why || (comparison ? ONE_CONDITION : NOTHING)}</p>`;
  return html`<${Banner} kind=${kind} open=${!failed.length && first && isOpen(first.word)} title=${title}>
    ${failed.length > 0 && html`<${Failures} failed=${failed} rest=${summary.runs.failed - failed.length} />`}
    ${resume && html`<${Resume} ...${resume} />`}
    ${banner.verdict && first ? verdict(first.label, first.word, banner.verdict) : why}
    ${others.map((each) => each.sentence && verdict(each.label, each.verdict, each.sentence))}
  <//>`;
}

function Failures({failed, rest}) {
  const item = ({place, run_id, label, seed, step, line}) => html`<li key=${run_id}>
    <a href=${link("notes", place)} aria-label=${`log of ${run_id}`}>${label}, seed ${seed}</a>
    <span class="muted"> failed after ${plural(step, "step")}: </span><code>${line || "no reason was recorded"}</code>
  </li>`;
  return html`<ul class="failures">
    ${failed.map(item)}${rest > 0 && html`<li class="muted">and ${plural(rest, "more failed run")}</li>`}
  </ul>`;
}

function Resume({command, now}) {
  const label = "command that continues this campaign";
  return html`<${Copyable} text=${command} label=${label} message="Command copied">
    ${!now && html`<span class="muted small">once the other runs have ended</span>`}
  <//>`;
}

// What the comparison warns of.
export function Warnings({comparison}) {
  const {warnings = [], note: all = "", follow_up: more} = comparison || {};
  const note = warnings.reduce((text, each) => text.replace(each, ""), all || "").trim();
  const details = html`<details class="weak">
    <summary>${plural(Math.max(1, warnings.length), "caveat")}</summary>
    ${[...warnings, note].map((text, i) => text && html`<p key=${i}>${text}</p>`)}
  </details>`;
  return html`${(warnings.length > 0 || note) && details}${more && html`<p class="muted">${more}</p>`}`;
}
