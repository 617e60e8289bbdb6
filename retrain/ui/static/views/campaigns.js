// All campaigns and runs below the given directories: state, held-out accuracy, verdict, progress, newest warning.

import {IntervalBar, classOf, reach} from "../components/interval_bar.js";
import {AddressChoice, AddressSearch, Tabs} from "../components/inputs.js";
import {Rate, Sparkline, Swatch} from "../components/marks.js";
import {Answered, Empty, NotRecorded, Title} from "../components/states.js";
import {Table, numberColumn} from "../components/table.js";
import {ago, clock, count, difference, duration, hours, percent, plural} from "../format.js";
import {step, useKeys} from "../keys.js";
import {go, link, useAddress} from "../lib/address.js";
import {EVERY_KIND, useAnswer} from "../lib/answer.js";
import {html, useEffect, useElement, useLayoutEffect, useMemo, useState} from "../lib/html.js";
import {setPlaces} from "../places.js";

const STATES = ["running", "done", "failed", "stopped", "interrupted", "pending"];
const MOST_CONDITIONS = 4;
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

const conditionsOf = ({heldout}) => (heldout ? heldout.conditions : []);

function Name({name, place, kind, state, source, runs, note, missing}) {
  const home = link(kind === "campaign" ? "campaign" : "metrics", place);
  const part = (name) =>
    runs[name] > 0 && runs.planned > 1 && html`<span class=${`pill ${name}`}>${runs[name]} ${name}</span>`;
  const words = note && `step ${note.step}, ${note.run}: ${note.text}`;
  const warning = html`<div class="small note warn"><a href=${link("notes", place)} class="quiet">${words}</a></div>`;
  return html`<a class="open" href=${home} title=${place}>${name}</a>
    <span class=${`pill ${state}`}>${state}</span>${part("running")}${part("failed")}
    ${source !== "retrain" && html`<span class="chip">${source}</span>`}
    <div class="muted small">${place}</div>
    ${note && note.level !== "info" && warning}<${NotRecorded} items=${missing} />`;
}

function Accuracy(summary) {
  const conditions = conditionsOf(summary);
  if (!conditions.length) return html`<span class="muted">${summary.heldout ? "not evaluated" : "–"}</span>`;
  const spoken = conditions.map(({label, points}) => `${label} ${percent(points[points.length - 1][1])}`);
  const more = conditions.length - MOST_CONDITIONS;
  const row = ({label, index, last}) => html`<div class="last" key=${label}>
    <span class="label" title=${`${label}, step ${last.step}, mean of ${plural(last.runs, "run")}`}>
      <${Swatch} index=${index} />${label}
    </span>
    <${Rate} ...${last} />
  </div>`;
  return html`<div class="accuracy">
    <${Sparkline} lines=${conditions} label=${`held-out accuracy over the steps: ${spoken.join(", ")}`} />
    <div>
      ${conditions.slice(0, MOST_CONDITIONS).map(row)}
      ${more > 0 && html`<div class="muted small">and ${plural(more, "more condition")}</div>`}
    </div>
  </div>`;
}

function Verdict({verdict, kind}, most) {
  if (!verdict) return html`<span class="muted">${kind === "campaign" ? "no comparison yet" : "a single run"}</span>`;
  const {word, sentence, share, low, high} = verdict;
  const write = (value) => difference(value, share);
  const interval = low === null ? "" : ` [${write(low)}, ${write(high)}]`;
  return html`<div class=${`verdict ${classOf(word)}`}>
    <b>${word}</b>
    <div class="bars">
      <${IntervalBar} verdict=${verdict} most=${share ? most : reach([verdict])} width=${120} />
      <span class="numbers small">
        ${write(verdict.difference)}${share && " points"}<span class="muted">${interval}</span>
      </span>
    </div>
    <span class="sentence small muted" title=${sentence}>${sentence}</span>
  </div>`;
}

function Progress({name, seeds, steps, left_s}) {
  const {done, planned} = steps;
  const facts = [
    left_s ? `about ${duration(left_s)} left` : "",
    seeds.planned > 1 ? `${seeds.done} of ${plural(seeds.planned, "seed")}` : "",
  ];
  return html`${count(done)}${planned ? ` of ${count(planned)}` : ""}
    ${done < planned && html`<progress max=${planned} value=${done} aria-label=${`steps of ${name}`} />`}
    ${facts.filter(Boolean).map((fact) => html`<div class="small muted" key=${fact}>${fact}</div>`)}`;
}

function Devices({devices, device_hours}) {
  const names = devices || [];
  const shown = names.length > 3 ? `${names.slice(0, 2).join(", ")} and ${names.length - 2} more` : names.join(", ");
  return html`<span title=${names.join(", ")}>${shown || "–"}</span>
    <div class="small muted">${hours(device_hours)}</div>`;
}

function bestRate(row) {
  const conditions = conditionsOf(row);
  return conditions.length ? Math.max(...conditions.map((each) => each.last.rate)) : null;
}

const Changed = ({updated}) => html`<time title=${updated ? clock(updated) : null}>${ago(updated)}</time>`;
const ACCURACY = "last evaluation: mean over the runs, 95 % interval over problems, number of problems";
const GAIN = "95 % interval over seeds; grey: what does not matter";

// `most`: what either end of the bars of shares stands for.
function columnsOf(most) {
  const gain = (row) => row.verdict && row.verdict.difference;
  const column = (key, title, cell, value, /** @type {any} */ hint = null) =>
    numberColumn(key, title, cell, {value, hint});
  return [
    {key: "name", title: "campaign", value: (row) => row.name, cell: Name},
    column("accuracy", "held-out accuracy, 95 %", Accuracy, bestRate, ACCURACY),
    column("difference", "verdict, typical difference, 95 %", (row) => Verdict(row, most), gain, GAIN),
    column("progress", "steps", Progress, ({steps}) => (steps.planned ? steps.done / steps.planned : null)),
    column("device_hours", "devices", Devices, (row) => row.device_hours),
    // What trains stands first and keeps its place while it changes.
    column("updated", "changed", Changed, (row) => (row.state === "running" ? Infinity : row.updated || 0)),
  ];
}

function chosen(places, {q = "", state}) {
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

/** Keeps the rows in sight where they are while new data moves them: the page scrolls by what most of them moved. */
function useSteadyRows(data) {
  const root = useElement();
  // Measured before the new rows are drawn.
  const rows = root.current ? [...root.current.querySelectorAll("tbody tr")] : [];
  const topOf = (row) => row.getBoundingClientRect().top;
  const before = rows.map((row) => ({row, top: topOf(row)})).filter(({top}) => top > 0 && top < innerHeight);
  useLayoutEffect(() => {
    const still = before.filter(({row}) => row.isConnected);
    const moves = still.map(({row, top}) => topOf(row) - top).sort((a, b) => a - b);
    if (scrollY && moves.length) scrollBy(0, moves[moves.length >> 1]);
  }, [data]);
  return root;
}

export function Campaigns() {
  const {query, patch} = useAddress();
  const choose = (state) => patch({state});
  const answer = useAnswer("places", {}, {kinds: EVERY_KIND, wait: 1000});
  const {data, retry} = answer;
  const root = useSteadyRows(data);
  const [, tick] = useState(0);
  const {done, of} = (data && data.reading) || {done: 0, of: 0};
  // Draw again now and then, since the page says how long ago things changed.
  useEffect(() => {
    const timer = setInterval(() => tick((n) => n + 1), 30000);
    return () => clearInterval(timer);
  }, []);
  useEffect(() => {
    if (data) setPlaces(data.places);
    if (done >= of) return;
    const timer = setTimeout(retry, 400);
    return () => clearTimeout(timer);
  }, [data, retry]);
  const open = () => {
    const first = root.current.querySelector("a.open");
    if (first) go(first.getAttribute("href"));
  };
  useKeys({
    j: ["next campaign", () => step("a.open", 1)],
    k: ["previous campaign", () => step("a.open", -1)],
    Enter: ["open it", open],
  });
  const places = data ? data.places : [];
  const states = STATES.filter((state) => places.some((each) => each.state === state)).map((state) => [state, state]);
  const words = html`<span class="spin" aria-hidden="true" />Reading ${done} of ${of} …`;
  const wait = html`<p class="muted" role="status">${words}</p>`;
  return html`<${Title} title="Campaigns" words=${totals(places)}>${done < of && wait}<//>
    <div class="tools">
      <${AddressSearch} label="search name, condition …" />
      <${Tabs} label="state" options=${[["", "all"], ...states]} value=${query.state || ""} onChoose=${choose} />
      <${AddressChoice} name="sort" label="order" options=${SORTS} resets=${{order: null}} />
    </div>
    <div ref=${root}>
      <${Answered} of=${answer}>${() => html`<${List} places=${places} query=${query} isReading=${done < of} />`}<//>
    </div>`;
}

function List({places, query, isReading}) {
  const {patch} = useAddress();
  const rows = useMemo(() => chosen(places, query), [places, query.q, query.state]);
  const columns = useMemo(() => {
    const verdicts = places.map((each) => each.verdict);
    return columnsOf(reach(verdicts.filter((verdict) => verdict && verdict.share)));
  }, [places]);
  if (!places.length) return isReading ? null : html`<${Empty} title="Nothing to show yet">${HELP}<//>`;
  if (!rows.length) return html`<${Empty} title="No campaign matches">Clear the search, or choose another state.<//>`;
  const key = SORTS.some(([each]) => each === query.sort) ? query.sort : "updated";
  // Names go up at first, numbers down.
  const down = query.order ? query.order === "down" : key !== "name";
  const sort = (to, toDown) => {
    const order = toDown === (to !== "name") ? null : toDown ? "down" : "up";
    patch({sort: to === "updated" ? null : to, order});
  };
  const table = {class: "campaigns", label: "campaigns", columns, rows, keyOf: (row) => row.place};
  return html`<${Table} ...${table} sort=${key} down=${down} onSort=${sort} />`;
}
