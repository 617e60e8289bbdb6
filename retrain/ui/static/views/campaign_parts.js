// The pictures of a campaign's page that are drawn from /api/campaign alone: results, cost, and how many more seeds.

import {FigureCard, Forest, Gain} from "../charts/forest.js";
import {table} from "../charts/save.js";
import {Copyable} from "../components/inputs.js";
import {Condition} from "../components/marks.js";
import {DataTable} from "../components/data_table.js";
import {amount, count, difference, duration, plural} from "../format.js";
import {html} from "../lib/html.js";
import {isOpen} from "../verdicts.js";

/** @type {Record<string, string>} */
const SUMMARIES = {
  final: "after the last update",
  last3: "mean of the last three evaluations",
  auc: "mean over the whole of training",
};

function ends(interval) {
  return interval || [null, null];
}

function written(interval, write) {
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
    const last = (held.conditions.find((one) => one.label === each.label) || {}).last;
    if (!last || !each.finished.length) return {interval: null, n: seeds(each)};
    const interval = last.low === null ? null : [last.low, last.high];
    return {interval, n: `n ${last.n}, ${seeds(each)}`};
  });
  return {over: "problems", rows};
}

export function Forests({body}) {
  const {comparison} = body;
  if (!comparison || !comparison.conditions.some((each) => each.after_values.length)) return null;
  return html`<div class="two"><${Levels} body=${body} /><${Differences} comparison=${comparison} /></div>`;
}

function Levels({body}) {
  const {metric, share, summary, conditions} = body.comparison;
  const {over, rows: intervals} = levelIntervals(body);
  const write = (value) => amount(value, share);
  const rows = conditions.map((each, index) => ({
    ...{name: each.label, index, centre: each.after_mean, interval: intervals[index].interval},
    values: each.after_values.map((value, i) => ({value, hint: `seed ${each.finished[i]}: ${write(value)}`})),
    note: `${write(each.after_mean)}${written(intervals[index].interval, write)} · ${intervals[index].n}`,
  }));
  const csv = () =>
    table(
      ["condition", "seed", metric, "mean", "mean low", "mean high"],
      conditions.flatMap((each, k) =>
        each.after_values.map((value, i) => [
          ...[each.label, each.finished[i], value, each.after_mean],
          ...ends(intervals[k].interval),
        ]),
      ),
    );
  const what = `${metric}, ${SUMMARIES[summary] || summary}`;
  const words = `${what}; a mark for each seed, line: mean, bar: 95 % interval over ${over}`;
  const label = `${what} by condition: ${rows.map((row) => `${row.name} ${row.note}`).join("; ")}`;
  return html`<${FigureCard} heading="Result" words=${words} title=${`${metric} by condition`} csv=${csv}>
    <${Forest} rows=${rows} label=${label} xTitle=${metric} unit=${share ? "%" : ""} />
  <//>`;
}

function Differences({comparison}) {
  const {metric, share, baseline, margin} = comparison;
  const apart = comparison.conditions
    .map((each, index) => ({...each, index}))
    .filter((each) => each.index > 0 && each.typical_difference !== null);
  const write = (value) => difference(value, share);
  const wider = ({difference_new_problems: found}) => (found && found.low !== null ? [found.low, found.high] : null);
  const amountOf = (each) => write(each.typical_difference) + written(each.difference_interval, write);
  const rows = apart.map((each) => ({
    ...{name: each.label, index: each.index, centre: each.typical_difference, interval: each.difference_interval},
    open: isOpen(each.verdict),
    values: each.differences.map((value, i) => ({value, hint: `seed ${each.paired_seeds[i]}: ${write(value)}`})),
    note: `${amountOf(each)} · ${plural(each.pairs, "pair")}`,
    hint: wider(each) ? `for other seeds and new problems${written(wider(each), write)}` : "",
  }));
  const csv = () =>
    table(
      [
        ...["condition", "baseline", "seed", "difference", "mean", "typical", "typical low", "typical high"],
        ...["new problems low", "new problems high", "margin", "verdict"],
      ],
      apart.flatMap((each) =>
        each.differences.map((value, i) => [
          ...[each.label, baseline, each.paired_seeds[i], value, each.difference, each.typical_difference],
          ...[...ends(each.difference_interval), ...ends(wider(each)), margin, each.verdict],
        ]),
      ),
    );
  const words = [
    `the same seed in both; line: typical difference${share ? " in points" : ""}, bar: 95 % interval over seeds`,
    margin ? "grey: what does not matter" : "",
    rows.some((row) => row.open && row.interval) ? "hatched: cannot tell yet" : "",
  ];
  const heading = `Paired difference to ${baseline}`;
  if (!rows.length) {
    return html`<figure class="card"><h2>${heading}</h2><p class="state">No pair of finished runs yet</p></figure>`;
  }
  const title = `${metric} difference to ${baseline}`;
  const unit = share ? "points" : "";
  const label = `paired differences: ${rows.map((row) => `${row.name} ${row.note}`).join("; ")}`;
  const axis = {xTitle: share ? "points" : `difference in ${metric}`, unit, zero: true, margin};
  return html`<${FigureCard} heading=${heading} words=${words.filter(Boolean).join("; ")} title=${title} csv=${csv}>
    <${Forest} rows=${rows} label=${label} ...${axis} />
  <//>`;
}

export function Costs({body: {comparison, cost}}) {
  const gains = (each) => each.seconds_per_run && (each.index === 0 || each.typical_difference !== null);
  const known = (cost || []).map((each, index) => ({...each, index})).filter(gains);
  if (known.length < 2 || !comparison) return null;
  const {metric, share} = comparison;
  const write = (each) => (each.index === 0 ? "baseline" : difference(each.typical_difference, share));
  const dear = (each) => `${duration(each.seconds_per_run)}, ${count(each.tokens_per_run)} tokens per run`;
  const points = known.map((each) => ({
    ...{name: each.label, index: each.index, x: each.seconds_per_run, interval: each.difference_interval},
    y: each.index === 0 ? 0 : each.typical_difference,
    hint: `${each.label}: ${dear(each)}, ${write(each)}`,
  }));
  const csv = () =>
    table(
      ["condition", "seconds per run", "tokens per run", "typical difference", "difference low", "difference high"],
      known.map((each) => [
        ...[each.label, each.seconds_per_run, each.tokens_per_run, each.typical_difference],
        ...ends(each.difference_interval),
      ]),
    );
  const columns = [
    {key: "condition", title: "condition", cell: ({index, label}) => html`<${Condition} index=${index}>${label}<//>`},
    {key: "time", title: "time / run", number: true, cell: (each) => duration(each.seconds_per_run)},
    {key: "tokens", title: "tokens / run", number: true, cell: (each) => count(each.tokens_per_run)},
    {key: "gain", title: "typical difference", number: true, cell: write},
  ];
  const label = `difference to the baseline by device time per run: ${points.map((each) => each.hint).join("; ")}`;
  const unit = share ? "points" : "";
  const axes = {xTitle: "device time per run", xText: (value) => (value === 0 ? "0" : duration(value)), unit};
  const words = "up: better than the baseline; right: dearer; bar: 95 % interval over seeds";
  const title = `cost against gain ${metric}`;
  return html`<${FigureCard} heading="Cost against gain" words=${words} title=${title} csv=${csv}>
    <${Gain} points=${points} label=${label} yTitle=${share ? "points" : "difference"} ...${axes} />
    <${DataTable} columns=${columns} rows=${known} keyOf=${(each) => each.label} label="cost" class="tight" />
  <//>`;
}

export function Seeds({power}) {
  const known = (power || []).filter((each) => each.line);
  if (!known.length) return null;
  const item = ({label, line, toml}) => html`<div key=${label}>
    <p>${line}</p>
    ${toml && html`<${Copyable} text=${toml} label=${`seeds for ${label}`} message="TOML copied" />`}
  </div>`;
  return html`<section class="card">
    <h2>How many more seeds?</h2>
    ${known.map(item)}
    <p class="muted small">
      Declare them as a new campaign: seeds that are added because of a result make it look surer than it is.
    </p>
  </section>`;
}
