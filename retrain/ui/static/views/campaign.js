// One campaign: what came of it, in a sentence and as a picture; curves; cost; how many more seeds; its runs.

import {Answered, NotRecorded, Title} from "../components/states.js";
import {CONDITION_COLUMN, Table, numberColumn} from "../components/table.js";
import {ago, count, duration, hours, plural} from "../format.js";
import {go, link, useAddress} from "../lib/address.js";
import {EVERY_KIND, useAnswer} from "../lib/answer.js";
import {html} from "../lib/html.js";
import {Outcome, Warnings} from "./campaign_banner.js";
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

function agoText(seconds) {
  return typeof seconds === "number" ? `${duration(seconds)} ago` : "–";
}

const COLUMNS = [
  CONDITION_COLUMN,
  numberColumn("seed", "seed", (run) => run.seed),
  {key: "state", title: "state", cell: (run) => html`<${RunState} ...${run} />`},
  numberColumn("steps", "steps", (run) => html`<${RunSteps} ...${run} />`),
  {key: "changed", title: "changed", cell: ({age_s: age}) => html`<span class="muted">${agoText(age)}</span>`},
  {key: "links", title: "look at", cell: (run) => html`<${RunLinks} ...${run} />`},
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
  return html`<span class="links">
    <a href=${link("metrics", place)} aria-label=${`metrics of ${id}`}>metrics</a>
    <a href=${link("timeline", place)} aria-label=${`timeline of ${id}`}>timeline</a>
    <a href=${link("notes", place)} aria-label=${`notes and log of ${id}`}>log</a>
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
