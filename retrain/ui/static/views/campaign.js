// One campaign: what came of it, in a sentence and as a picture; curves; cost; how many more seeds; its runs.

import {Copyable} from "../components/inputs.js";
import {classOf, isOpen} from "../components/interval_bar.js";
import {Answered, Banner, NotRecorded, Title} from "../components/states.js";
import {CONDITION_COLUMN, Table, numberColumn} from "../components/table.js";
import {ago, count, duration, hours, plural} from "../format.js";
import {go, link, useAddress} from "../lib/address.js";
import {EVERY_KIND, useAnswer} from "../lib/answer.js";
import {html} from "../lib/html.js";
import {Curves} from "./campaign_curves.js";
import {Costs, Forests, Seeds} from "./campaign_parts.js";

const MOST_WORKERS = 8;

export function Campaign() {
  const {place} = useAddress();
  const answer = useAnswer("campaign", {at: place}, {kinds: EVERY_KIND, wait: 2500});
  const content = (body) => html`<${Title} title=${body.summary.name} words=${factsOf(body)} />
    <${Outcome} body=${body} />
    <${Warnings} comparison=${body.comparison} />
    <${Forests} body=${body} />
    <${NotRecorded} items=${body.summary.missing} />
    <${Curves} campaign=${body} />
    <div class="two"><${Costs} body=${body} /><${Seeds} power=${body.power} /></div>
    <${Runs} runs=${body.runs} />
    <${Checksums} sums=${body.checksums} />`;
  return html`<${Answered} of=${answer}>${content}<//>`;
}

// Return on which workers the runs train, where there are several; of many the first ones.
function workerWords(workers) {
  const more = workers.length - MOST_WORKERS;
  const names = workers.slice(0, MOST_WORKERS).join(", ");
  return names && `on ${names}${more > 0 ? ` and ${plural(more, "more worker")}` : ""}`;
}

function factsOf({summary: {conditions, workers, left_s, device_hours, updated}, fresh}) {
  const facts = [
    plural((conditions || []).length, "condition"),
    workerWords(workers || []),
    left_s ? `about ${duration(left_s)} left` : "",
    device_hours ? `${hours(device_hours)} of device time` : "",
    updated ? `changed ${ago(updated)}` : "",
    fresh === false ? "being compared anew …" : "",
  ];
  return facts.filter(Boolean).join(" · ");
}

const agoText = (seconds) => (typeof seconds === "number" ? `${duration(seconds)} ago` : "–");

const COLUMNS = [
  CONDITION_COLUMN,
  numberColumn("seed", "seed", (run) => run.seed),
  {key: "state", title: "state", cell: RunState},
  numberColumn("steps", "steps", RunSteps),
  {key: "changed", title: "changed", cell: ({age_s: age}) => html`<span class="muted">${agoText(age)}</span>`},
  {key: "links", title: "look at", cell: RunLinks},
];

function Runs({runs}) {
  const rows = [...runs].sort((a, b) => a.index - b.index || a.seed - b.seed);
  const open = (run) => go(link("metrics", run.place));
  const table = {class: "tight wide", columns: COLUMNS, rows, keyOf: (run) => run.place, label: "runs", noun: "run"};
  return html`<section id="runs"><h2>Runs</h2><${Table} ...${table} onOpen=${open} /></section>`;
}

function RunState({state, reason, worker}) {
  return html`<span class=${`pill flush ${state}`}>${state}</span>
    ${reason && html`<span class="small bad reason">${reason}</span>`}
    ${worker && html`<span class="small muted reason">worker ${worker}</span>`}`;
}

function RunSteps({run_id: id, state, step, max_steps: max}) {
  const bar = html`<progress max=${max} value=${step} aria-label=${`steps of ${id}`} />`;
  return html`${count(step)}${max ? ` of ${count(max)}` : ""}${state === "running" && max && bar}`;
}

function RunLinks({place, run_id: id}) {
  const to = (view, text, name = text) =>
    html`<a href=${link(view, place)} aria-label=${`${name} of ${id}`}>${text}</a>`;
  return html`<span class="links">
    ${to("metrics", "metrics")} ${to("timeline", "timeline")} ${to("notes", "log", "notes and log")}
  </span>`;
}

function Checksums({sums}) {
  const known = Object.entries(sums || {}).filter(([, value]) => value);
  const each = (value) => {
    if (typeof value === "string") return html`<code title=${value}>${value.slice(0, 16)}</code>`;
    const runs = Object.entries(value).map(([run, sum]) => `${run}: ${sum}`);
    return html`<b class="warn" title=${runs.join("\n")}>differs between runs</b>`;
  };
  const sum = ([name, value]) => html`<span key=${name}>${name.replace(/_/g, " ")} ${each(value)}</span>`;
  return known.length > 0 && html`<p class="muted small sums">${known.map(sum)}</p>`;
}

const ONE_CONDITION = "One condition only: there is nothing to compare it with.";
const NOTHING = "No two conditions have a finished run with a value.";

function Outcome({body: {banner, comparison, summary}}) {
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

function Warnings({comparison}) {
  const {warnings = [], note: all = "", follow_up: more} = comparison || {};
  const note = warnings.reduce((text, each) => text.replace(each, ""), all || "").trim();
  const details = html`<details class="weak">
    <summary>${plural(Math.max(1, warnings.length), "caveat")}</summary>
    ${[...warnings, note].map((text, i) => text && html`<p key=${i}>${text}</p>`)}
  </details>`;
  return html`${(warnings.length > 0 || note) && details}${more && html`<p class="muted">${more}</p>`}`;
}
