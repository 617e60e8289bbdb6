// All campaigns and runs below the given directories: state, held-out accuracy, verdict, progress, newest warning.

import {IntervalBar} from "../components/interval_bar.js";
import {Choice, SearchField, Tabs} from "../components/inputs.js";
import {Rate, Sparkline, Swatch} from "../components/marks.js";
import {Answered, Empty, NotRecorded} from "../components/states.js";
import {DataTable} from "../components/data_table.js";
import {ago, clock, count, difference, duration, hours, percent, plural} from "../format.js";
import {step, useKeys} from "../keys.js";
import {useAddress} from "../lib/address.js";
import {useAnswer} from "../lib/answer.js";
import {html, useEffect, useLayoutEffect, useMemo, useRef, useState} from "../lib/html.js";
import {EVERY_KIND} from "../lib/live.js";
import {tell} from "../places.js";
import {go, link} from "../router.js";
import {classOf, reach} from "../verdicts.js";

const STATES = ["running", "done", "failed", "stopped", "interrupted", "pending"];
const MOST_CONDITIONS = 4;
/** @type {[string, string][]} */
const SORTS = [
  ["updated", "newest first"],
  ["name", "by name"],
  ["accuracy", "by accuracy"],
  ["difference", "by difference"],
  ["progress", "by progress"],
  ["device_hours", "by device time"],
];
const HELP =
  "There is no campaign and no run below the given directories. `retrain train campaigns/quickstart.toml` trains one " +
  "in a minute; it appears here by itself.";

function home({kind, place}) {
  return link(kind === "campaign" ? "campaign" : "metrics", place);
}

function conditionsOf(summary) {
  return summary.heldout ? summary.heldout.conditions : [];
}

/** @param {{summary: any}} props */
function Name({summary}) {
  const {name, place, state, source, runs, note, missing} = summary;
  const part = (kind, shown) => shown && html`<span class=${`pill ${kind}`}>${runs[kind]} ${kind}</span>`;
  return html`<a class="open" href=${home(summary)} title=${place}>${name}</a>
    <span class=${`pill ${state}`}>${state}</span>
    ${part("running", runs.running > 0 && runs.planned > 1)}${part("failed", runs.failed > 0 && runs.planned > 1)}
    ${source !== "retrain" && html`<span class="chip">${source}</span>`}
    <div class="muted small">${place}</div>
    ${
      note &&
      note.level !== "info" &&
      html`<div class="small note warn">
        <a href=${link("notes", place)} class="quiet">step ${note.step}, ${note.run}: ${note.text}</a>
      </div>`
    }
    <${NotRecorded} items=${missing} />`;
}

/** @param {{summary: any}} props */
function Accuracy({summary}) {
  const conditions = conditionsOf(summary);
  if (!conditions.length) return html`<span class="muted">${summary.heldout ? "not evaluated" : "–"}</span>`;
  const spoken = conditions.map(({label, points}) => `${label} ${percent(points[points.length - 1][1])}`);
  const more = conditions.length - MOST_CONDITIONS;
  const row = ({label, index, last}) => html`<div class="last" key=${label}>
    <span class="label" title=${`${label}, step ${last.step}, mean of ${plural(last.runs, "run")}`}>
      <${Swatch} index=${index} />${label}
    </span>
    <${Rate} value=${last.rate} n=${last.n} low=${last.low} high=${last.high} />
  </div>`;
  return html`<div class="accuracy">
    <${Sparkline} lines=${conditions} label=${`held-out accuracy over the steps: ${spoken.join(", ")}`} />
    <div>
      ${conditions.slice(0, MOST_CONDITIONS).map(row)}
      ${more > 0 && html`<div class="muted small">and ${plural(more, "more condition")}</div>`}
    </div>
  </div>`;
}

/** @param {{summary: any, most: number}} props */
function Verdict({summary: {verdict, kind}, most}) {
  if (!verdict) return html`<span class="muted">${kind === "campaign" ? "no comparison yet" : "a single run"}</span>`;
  const {word, sentence, share, low, high} = verdict;
  const write = (value) => difference(value, share);
  const size = `${write(verdict.difference)}${share ? " points" : ""}`;
  const interval = low === null ? "" : ` [${write(low)}, ${write(high)}]`;
  return html`<div class=${`verdict ${classOf(word)}`}>
    <b>${word}</b>
    <div class="bars">
      <${IntervalBar} verdict=${verdict} most=${share ? most : reach([verdict])} width=${120} />
      <span class="numbers">${size}<span class="muted">${interval}</span></span>
    </div>
    <span class="sentence" title=${sentence}>${sentence}</span>
  </div>`;
}

/** @param {{summary: any}} props */
function Progress({summary: {name, seeds, steps, left_s}}) {
  const {done, planned} = steps;
  const unfinished = planned > 0 && done < planned;
  const facts = [
    left_s ? `about ${duration(left_s)} left` : "",
    seeds.planned > 1 ? `${seeds.done} of ${plural(seeds.planned, "seed")}` : "",
  ];
  return html`${count(done)}${planned ? ` of ${count(planned)}` : ""}
    ${unfinished && html`<progress max=${planned} value=${done} aria-label=${`steps of ${name}`} />`}
    ${facts.filter(Boolean).map((fact) => html`<div class="small muted" key=${fact}>${fact}</div>`)}`;
}

/** @param {{summary: any}} props */
function Devices({summary: {devices, device_hours}}) {
  const names = devices || [];
  const shown = names.length > 3 ? `${names.slice(0, 2).join(", ")} and ${names.length - 2} more` : names.join(", ");
  return html`<span title=${names.join(", ")}>${shown || "–"}</span>
    <div class="small muted">${hours(device_hours)}</div>`;
}

/**
 * @param {number} most what either end of the bars of shares stands for
 * @returns {import("../components/table.js").Column[]}
 */
function columnsOf(most) {
  const best = (row) => Math.max(...conditionsOf(row).map((each) => each.last.rate));
  const changed = ({updated}) => html`<time title=${updated ? clock(updated) : null}>${ago(updated)}</time>`;
  return [
    {...{key: "name", title: "campaign", value: (row) => row.name}, cell: (row) => html`<${Name} summary=${row} />`},
    {
      ...{key: "accuracy", title: "held-out accuracy, 95 %", number: true},
      hint: "last evaluation: mean over the runs, 95 % interval over problems, number of problems",
      value: (row) => (conditionsOf(row).length ? best(row) : null),
      cell: (row) => html`<${Accuracy} summary=${row} />`,
    },
    {
      ...{key: "difference", title: "verdict, typical difference, 95 %", number: true},
      hint: "95 % interval over seeds; grey: what does not matter",
      value: (row) => row.verdict && row.verdict.difference,
      cell: (row) => html`<${Verdict} summary=${row} most=${most} />`,
    },
    {
      ...{key: "progress", title: "steps", number: true},
      value: ({steps}) => (steps.planned ? steps.done / steps.planned : null),
      cell: (row) => html`<${Progress} summary=${row} />`,
    },
    {
      ...{key: "device_hours", title: "devices", number: true, value: (row) => row.device_hours},
      cell: (row) => html`<${Devices} summary=${row} />`,
    },
    {
      ...{key: "updated", title: "changed", number: true},
      // What trains stands first and keeps its place while it changes.
      value: ({state, updated}) => (state === "running" ? Infinity : updated || 0),
      cell: changed,
    },
  ];
}

/**
 * Return the campaigns that pass the filters, by name.
 * @param {any[]} places
 * @param {import("../lib/address.js").Query} query
 */
function chosen(places, query) {
  const {q = "", state} = query;
  const words = q.toLowerCase().split(/\s+/).filter(Boolean);
  const text = ({place, conditions, source}) => `${place} ${(conditions || []).join(" ")} ${source}`.toLowerCase();
  const passes = (each) => (!state || each.state === state) && words.every((word) => text(each).includes(word));
  return places.filter(passes).sort((a, b) => a.place.localeCompare(b.place));
}

function totals(places) {
  const hoursOfAll = places.reduce((sum, each) => sum + (each.device_hours || 0), 0);
  const running = places.filter((each) => each.state === "running").length;
  const campaigns = plural(places.filter((each) => each.kind === "campaign").length, "campaign");
  const parts = [campaigns, running && `${running} running`, hoursOfAll && `${hours(hoursOfAll)} of device time`];
  return parts.filter(Boolean).join(" · ");
}

/**
 * Keeps the rows in sight where they are while new data moves them: the page scrolls by what most of them moved.
 * @param {any} data
 */
function useSteadyRows(data) {
  const root = useRef(/** @type {HTMLElement | null} */ (null));
  // Measured before the new rows are drawn.
  const rows = root.current ? [...root.current.querySelectorAll("tbody tr")] : [];
  const before = rows.flatMap((row) => {
    const {top, bottom} = row.getBoundingClientRect();
    return bottom > 0 && top < innerHeight ? [{row, top}] : [];
  });
  useLayoutEffect(() => {
    if (!scrollY) return;
    const still = before.filter(({row}) => row.isConnected);
    const moves = still.map(({row, top}) => row.getBoundingClientRect().top - top).sort((a, b) => a - b);
    if (moves.length) scrollBy(0, moves[moves.length >> 1]);
  }, [data]);
  return root;
}

// Draw again now and then, since the page says how long ago things changed.
function useClock() {
  const [, tick] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => tick((n) => n + 1), 30000);
    return () => clearInterval(timer);
  }, []);
}

export function Campaigns() {
  const {query, patch} = useAddress();
  const answer = useAnswer("places", {}, {kinds: EVERY_KIND, wait: 1000});
  const {data, retry} = answer;
  const root = useSteadyRows(data);
  useClock();
  useEffect(() => {
    if (!data) return;
    tell(data.places);
    if (!isReading(data)) return;
    const timer = setTimeout(retry, 400);
    return () => clearTimeout(timer);
  }, [data, retry]);
  const open = () => {
    const first = root.current && root.current.querySelector("a.open");
    if (first) go(first.getAttribute("href"));
  };
  useKeys({
    j: ["next campaign", () => step("a.open", 1)],
    k: ["previous campaign", () => step("a.open", -1)],
    Enter: ["open it", open],
  });
  const places = data ? data.places : [];
  const states = STATES.filter((state) => places.some((each) => each.state === state)).map((state) => [state, state]);
  const search = (q) => patch({q: q || null}, {replace: true});
  const sort = (key) => patch({sort: key === "updated" ? null : key, order: null});
  const filter = (state) => patch({state: state || null});
  const wait = isReading(data) && `Reading ${data.reading.done} of ${data.reading.of} …`;
  return html`<div class="title">
      <h1>Campaigns</h1>
      <p class="muted">${totals(places)}</p>
      ${wait && html`<p class="muted" role="status"><span class="spin" aria-hidden="true" />${wait}</p>`}
    </div>
    <div class="tools">
      <${SearchField} label="search name, condition …" value=${query.q || ""} onSearch=${search} wait=${120} />
      <${Tabs} label="state" options=${[["", "all"], ...states]} value=${query.state || ""} onChoose=${filter} />
      <${Choice} label="order" options=${SORTS} value=${query.sort || "updated"} onChoose=${sort} />
    </div>
    <div ref=${root}><${Answered} of=${answer}>${() => html`<${List} places=${places} reading=${wait} />`}<//></div>`;
}

function isReading(data) {
  return Boolean(data && data.reading && data.reading.done < data.reading.of);
}

/** @param {{places: any[], reading: string | false}} props */
function List({places, reading}) {
  const {query, patch} = useAddress();
  const rows = useMemo(() => chosen(places, query), [places, query.q, query.state]);
  const columns = useMemo(
    () => columnsOf(reach(places.map((each) => each.verdict).filter((verdict) => verdict && verdict.share))),
    [places],
  );
  if (!places.length) return reading ? null : html`<${Empty} title="Nothing to show yet">${HELP}<//>`;
  if (!rows.length) {
    return html`<${Empty} title="No campaign matches">Clear the search, or choose another state.<//>`;
  }
  const sort = columns.find((each) => each.key === query.sort) || columns[columns.length - 1];
  const usual = Boolean(sort.number);
  const down = query.order ? query.order === "down" : usual;
  const choose = (key, toDown) => {
    const column = columns.find((each) => each.key === key);
    const order = toDown === Boolean(column && column.number) ? null : toDown ? "down" : "up";
    patch({sort: key === "updated" ? null : key, order});
  };
  const order = {sort: sort.key, down, onSort: choose};
  return html`<${DataTable}
    class="campaigns"
    label="campaigns"
    columns=${columns}
    rows=${rows}
    keyOf=${(row) => row.place}
    ...${order}
  />`;
}
