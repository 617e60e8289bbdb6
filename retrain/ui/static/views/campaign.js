// One campaign: what came of it, in a sentence and as a picture; curves; cost; how many more seeds; its runs.

import {Condition} from "../components/marks.js";
import {Answered, NotRecorded} from "../components/states.js";
import {DataTable} from "../components/data_table.js";
import {ago, count, duration, hours, plural} from "../format.js";
import {useAddress} from "../lib/address.js";
import {useAnswer} from "../lib/answer.js";
import {html} from "../lib/html.js";
import {EVERY_KIND} from "../lib/live.js";
import {go, link} from "../router.js";
import {Outcome, Warnings} from "./campaign_banner.js";
import {Curves} from "./campaign_curves.js";
import {Costs, Forests, Seeds} from "./campaign_parts.js";

const MOST_WORKERS = 8;

export function Campaign() {
  const {place} = useAddress();
  const answer = useAnswer("campaign", {at: place}, {kinds: EVERY_KIND, wait: 2500});
  return html`<${Answered} of=${answer}>
    ${(body) => html`
      <${Head} body=${body} />
      <${Outcome} body=${body} />
      <${Warnings} comparison=${body.comparison} />
      <${Forests} body=${body} />
      <${NotRecorded} items=${body.summary.missing} />
      <${Curves} campaign=${body} />
      <div class="two"><${Costs} body=${body} /><${Seeds} power=${body.power} /></div>
      <${Runs} runs=${body.runs} />
      <${Checksums} sums=${body.checksums} />
    `}
  <//>`;
}

// Return on which workers the runs train, where there are several; of many the first ones.
function workerWords(workers) {
  if (!workers.length) return "";
  const more = workers.length - MOST_WORKERS;
  const names = workers.slice(0, MOST_WORKERS).join(", ");
  return `on ${names}${more > 0 ? ` and ${plural(more, "more worker")}` : ""}`;
}

function Head({body: {summary, fresh}}) {
  const {conditions, workers, left_s, device_hours, updated} = summary;
  const facts = [
    plural((conditions || []).length, "condition"),
    workerWords(workers || []),
    left_s ? `about ${duration(left_s)} left` : "",
    device_hours ? `${hours(device_hours)} of device time` : "",
    updated ? `changed ${ago(updated)}` : "",
    fresh === false ? "being compared anew …" : "",
  ];
  return html`<div class="title">
    <h1>${summary.name}</h1>
    <p class="muted">${facts.filter(Boolean).join(" · ")}</p>
  </div>`;
}

/** @type {import("../components/table.js").Column[]} */
const COLUMNS = [
  {key: "condition", title: "condition", cell: ({index, label}) => html`<${Condition} index=${index}>${label}<//>`},
  {key: "seed", title: "seed", number: true, cell: (run) => run.seed},
  {key: "state", title: "state", cell: (run) => html`<${RunState} run=${run} />`},
  {key: "steps", title: "steps", number: true, cell: (run) => html`<${RunSteps} run=${run} />`},
  {
    key: "changed",
    title: "changed",
    cell: ({age_s}) => html`<span class="muted">${typeof age_s === "number" ? `${duration(age_s)} ago` : "–"}</span>`,
  },
  {key: "links", title: "look at", cell: (run) => html`<${RunLinks} run=${run} />`},
];

function Runs({runs}) {
  const rows = [...runs].sort((a, b) => a.index - b.index || a.seed - b.seed);
  const open = (run) => go(link("metrics", run.place));
  const table = {columns: COLUMNS, rows, keyOf: (run) => run.place, label: "runs", noun: "run"};
  return html`<section id="runs"><h2>Runs</h2><${DataTable} ...${table} onOpen=${open} /></section>`;
}

function RunState({run: {state, reason, worker}}) {
  return html`<span class=${`pill flush ${state}`}>${state}</span>
    ${reason && html`<span class="small bad reason">${reason}</span>`}
    ${worker && html`<span class="small muted reason">worker ${worker}</span>`}`;
}

function RunSteps({run: {run_id, state, step, max_steps}}) {
  const label = `steps of ${run_id}`;
  const bar = state === "running" && max_steps;
  return html`${count(step)}${max_steps ? ` of ${count(max_steps)}` : ""}
    ${bar && html`<progress max=${max_steps} value=${step} aria-label=${label} />`}`;
}

function RunLinks({run: {place, run_id}}) {
  return html`<span class="links">
    <a href=${link("metrics", place)} aria-label=${`metrics of ${run_id}`}>metrics</a>
    <a href=${link("timeline", place)} aria-label=${`timeline of ${run_id}`}>timeline</a>
    <a href=${link("notes", place)} aria-label=${`notes and log of ${run_id}`}>log</a>
  </span>`;
}

function Checksums({sums}) {
  const known = Object.entries(sums || {}).filter(([, value]) => value);
  if (!known.length) return null;
  const each = (value) => {
    if (typeof value === "string") return html`<code title=${value}>${value.slice(0, 16)}</code>`;
    const runs = Object.entries(value).map(([run, sum]) => `${run}: ${sum}`);
    return html`<b class="warn" title=${runs.join("\n")}>differs between runs</b>`;
  };
  return html`<p class="muted small sums">
    ${known.map(([name, value]) => html`<span key=${name}>${name.replace(/_/g, " ")} ${each(value)}</span>`)}
  </p>`;
}
