// The pictures of a campaign's page that are drawn from /api/campaign alone: results, cost, and how many more seeds.

import {FigureCard, Forest} from "../charts/forest.js";
import {table} from "../charts/save.js";
import {Copyable} from "../components/inputs.js";
import {CONDITION_COLUMN, Table, numberColumn} from "../components/table.js";
import {amount, count, difference, duration, plural} from "../format.js";
import {html} from "../lib/html.js";
import {isOpen} from "../components/interval_bar.js";

/** @type {Record<string, string>} */
const SUMMARIES = {
  final: "after the last update",
  last3: "mean of the last three evaluations",
  auc: "mean over the whole of training",
};

const ends = (interval) => interval || [null, null];

function intervalText(interval, write) {
  return interval ? ` [${write(interval[0])}, ${write(interval[1])}]` : "";
}

// Return the interval of each condition's result and its n. They are over seeds; where no condition has two finished
// seeds, over the problems of the last evaluation.
function levelIntervals({comparison, summary}) {
  const {conditions, metric} = comparison;
  const seeds = ({finished, seeds: planned}) => `${finished.length} of ${plural(planned.length, "seed")}`;
  const held = summary.heldout;
  const isLast = comparison.summary === "final" && held && metric === `eval/${held.set}/correct_rate`;
  if (!isLast || conditions.some((each) => each.interval)) {
    return {over: "seeds", rows: conditions.map((each) => ({interval: each.interval, n: seeds(each)}))};
  }
  const rows = conditions.map((each) => {
    const {last} = held.conditions.find((one) => one.label === each.label) || {};
    if (!last || !each.finished.length) return {interval: null, n: seeds(each)};
    return {interval: last.low === null ? null : [last.low, last.high], n: `n ${last.n}, ${seeds(each)}`};
  });
  return {over: "problems", rows};
}

export function Forests({body}) {
  const {comparison} = body;
  if (!comparison || !comparison.conditions.some((each) => each.after_values.length)) return null;
  const apart = comparison.conditions.length > 1 && html`<${Differences} comparison=${comparison} />`;
  return html`<div class="two"><${Levels} body=${body} />${apart}</div>`;
}

// A forest plot as a card; `heads` and the rows' `cells` are of the file with a line for each value.
function ForestCard({heading, words, title, label, rows, heads, axis}) {
  const lines = ({values, cells}) => values.map(({seed, value}) => cells(seed, value));
  const spoken = `${label}: ${rows.map((row) => `${row.name} ${row.note}`).join("; ")}`;
  return html`<${FigureCard} ...${{heading, words, title}} csv=${() => table(heads, rows.flatMap(lines))}>
    <${Forest} rows=${rows} label=${spoken} ...${axis} />
  <//>`;
}

function valuesOf(values, seeds, write) {
  return values.map((value, i) => ({value, seed: seeds[i], hint: `seed ${seeds[i]}: ${write(value)}`}));
}

function Levels({body}) {
  const {metric, share, summary, conditions} = body.comparison;
  const {over, rows: intervals} = levelIntervals(body);
  const write = (value) => amount(value, share);
  const rows = conditions.map(({label: name, after_mean: centre, after_values: values, finished}, index) => {
    const {interval, n} = intervals[index];
    const note = `${write(centre)}${intervalText(interval, write)} · ${n}`;
    const cells = (seed, value) => [name, seed, value, centre, ...ends(interval)];
    return {name, index, centre, interval, note, values: valuesOf(values, finished, write), cells};
  });
  const what = `${metric}, ${SUMMARIES[summary] || summary}`;
  const bar = intervals.some(({interval}) => interval) ? `, bar: 95 % interval over ${over}` : "";
  const words = `${what}; a mark for each seed, line: mean${bar}`;
  const card = {heading: "Result", words, title: `${metric} by condition`, label: `${what} by condition`, rows};
  const heads = ["condition", "seed", metric, "mean", "mean low", "mean high"];
  return html`<${ForestCard} ...${card} heads=${heads} axis=${{xTitle: metric, unit: share ? "%" : ""}} />`;
}

function Differences({comparison: {metric, share, baseline, margin, conditions}}) {
  const write = (value) => difference(value, share);
  const rows = conditions.flatMap((each, index) => {
    const {label: name, typical_difference: centre, difference_interval: interval, verdict} = each;
    if (index === 0 || centre === null) return [];
    const {low = null, high = null} = each.difference_new_problems || {};
    const wider = low === null ? null : [low, high];
    const before = (seed, value) => [name, baseline, seed, value, each.difference, centre];
    return {
      ...{name, index, centre, interval, wider, open: isOpen(verdict)},
      values: valuesOf(each.differences, each.paired_seeds, write),
      note: `${write(centre)}${intervalText(interval, write)} · ${plural(each.pairs, "pair")}`,
      cells: (seed, value) => [...before(seed, value), ...ends(interval), ...ends(wider), margin, verdict],
    };
  });
  const heading = `Paired difference to ${baseline}`;
  if (!rows.length) {
    return html`<figure class="card"><h2>${heading}</h2><p class="state">No pair of finished runs yet</p></figure>`;
  }
  const words = [
    `the same seed in both; line: typical difference${share ? " in points" : ""}`,
    rows.some((row) => row.interval) ? "bar: 95 % interval over seeds" : "",
    rows.some((row) => row.wider) ? "thin line: the same on new problems" : "",
    margin ? "grey: what does not matter" : "",
    rows.some((row) => row.open && row.interval) ? "hatched: cannot tell yet" : "",
  ];
  const heads = [
    ...["condition", "baseline", "seed", "difference", "mean", "typical", "typical low", "typical high"],
    ...["new problems low", "new problems high", "margin", "verdict"],
  ];
  const unit = share ? "points" : "";
  const axis = {xTitle: share ? "points" : `difference in ${metric}`, unit, zero: true, margin};
  const card = {heading, words: words.filter(Boolean).join("; "), title: `${metric} difference to ${baseline}`};
  return html`<${ForestCard} ...${card} label="paired differences" rows=${rows} heads=${heads} axis=${axis} />`;
}

export function Costs({body: {comparison, cost}}) {
  const gains = (each) => each.seconds_per_run && (each.index === 0 || each.typical_difference !== null);
  const known = (cost || []).map((each, index) => ({...each, index})).filter(gains);
  if (known.length < 2 || !comparison) return null;
  const {share} = comparison;
  const write = (value) => difference(value, share);
  const gain = ({index, typical_difference: centre, difference_interval: interval}) =>
    index === 0 ? "baseline" : write(centre) + intervalText(interval, write);
  const columns = [
    CONDITION_COLUMN,
    numberColumn("time", "time / run", (each) => duration(each.seconds_per_run)),
    numberColumn("tokens", "tokens / run", (each) => count(each.tokens_per_run)),
    numberColumn("gain", `typical difference${share ? ", points" : ""}`, gain),
  ];
  return html`<section class="card">
    <h2>Cost against gain<small>differences to the baseline, with 95 % intervals over seeds</small></h2>
    <${Table} columns=${columns} rows=${known} keyOf=${(each) => each.label} label="cost" />
  </section>`;
}

export function Seeds({power}) {
  const known = (power || []).filter((each) => each.line);
  const item = ({label, line, toml}) => html`<div key=${label}>
    <p>${line}</p>
    ${toml && html`<${Copyable} text=${toml} label=${`seeds for ${label}`} message="TOML copied" />`}
  </div>`;
  const words =
    "Declare them as a new campaign: seeds that are added because of a result make it look surer than it is.";
  return (
    known.length > 0 &&
    html`<section class="card">
    <h2>How many more seeds?</h2>${known.map(item)}<p class="muted small">${words}</p>
  </section>`
  );
}
