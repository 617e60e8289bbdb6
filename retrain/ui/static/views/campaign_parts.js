// @ts-nocheck
// The parts of a campaign's page that are drawn from /api/campaign alone.

import {name} from "../colours.js";
import {figureCard, forest, gain} from "../charts/forest.js";
import {table} from "../charts/save.js";
import {button, copy, el} from "../dom.js";
import {amount, count, difference, duration, plural} from "../format.js";
import {link} from "../router.js";
import {classOf, isOpen} from "../verdicts.js";

const SUMMARIES = {final: "after the last update", last3: "mean of the last three evaluations", auc: "mean over the whole of training"};

export function metricWords(comparison) {
  return `${comparison.metric}, ${SUMMARIES[comparison.summary] || comparison.summary}`;
}

export function verdicts(body) {
  const {comparison} = body;
  if (!comparison) {
    return el("div", {class: "card calm"}, el("b", null, "No comparison yet"), el("p", {class: "muted"}, body.why || "No two conditions have a finished run with a value."));
  }
  const found = comparison.conditions.slice(1).filter((each) => each.verdict || each.sentence);
  const warnings = [...(comparison.warnings || [])];
  return el("div", null,
    found.length ? el("ul", {class: "verdicts"}, found.map((each) => el("li", {class: `${classOf(each.verdict)}${isOpen(each.verdict) ? " open" : ""}`},
      el("b", null, each.verdict), each.sentence))) : el("p", {class: "muted"}, "One condition only: there is nothing to compare it with."),
    warnings.length || comparison.note ? el("details", {class: "weak"},
      el("summary", null, `${plural(Math.max(1, warnings.length), "thing")} that a reader must know`),
      warnings.map((text) => el("p", null, text)),
      comparison.note ? el("p", null, warnings.reduce((text, each) => text.replace(each, ""), comparison.note).trim()) : null) : null,
    comparison.follow_up ? el("p", {class: "muted"}, comparison.follow_up) : null);
}

export function forests(body) {
  const {comparison} = body;
  if (!comparison) return null;
  const unit = comparison.share ? "%" : "", conditions = comparison.conditions;
  if (!conditions.some((each) => each.after_values.length)) return null;
  const levels = conditions.map((each, index) => ({
    name: each.label, index, centre: each.after_mean, interval: each.interval,
    values: each.after_values.map((value, i) => ({value, hint: `seed ${each.finished[i]}: ${amount(value, comparison.share)}`})),
    note: `${each.after_mean === null ? "–" : amount(each.after_mean, comparison.share)} · ${each.finished.length} of ${plural(each.seeds.length, "seed")}`,
  }));
  const apart = conditions.map((each, index) => ({each, index})).slice(1).filter(({each}) => each.typical_difference !== null);
  const rows = apart.map(({each, index}) => ({
    name: each.label, index, centre: each.typical_difference, interval: each.difference_interval, open: isOpen(each.verdict),
    wider: each.difference_new_problems && each.difference_new_problems.low !== null ? [each.difference_new_problems.low, each.difference_new_problems.high] : null,
    values: each.differences.map((value, i) => ({value, hint: `seed ${each.paired_seeds[i]}: ${difference(value, comparison.share)}`})),
    note: `${difference(each.typical_difference, comparison.share)} typically · ${plural(each.pairs, "pair")}`,
  }));
  const baseline = comparison.baseline, words = `${metricWords(comparison)}; a mark for each seed, bar: 95 % interval`;
  const ends = (interval) => interval || [null, null];
  const levelTable = () => table(["condition", "seed", comparison.metric, "mean", "mean low", "mean high"],
    conditions.flatMap((each) => each.after_values.map((value, i) => [each.label, each.finished[i], value, each.after_mean, ...ends(each.interval)])));
  const apartTable = () => table(["condition", "baseline", "seed", "difference", "mean", "typical", "typical low", "typical high", "new problems low", "new problems high", "margin", "verdict"],
    apart.flatMap(({each}, k) => each.differences.map((value, i) => [each.label, baseline, each.paired_seeds[i], value, each.difference, each.typical_difference, ...ends(each.difference_interval), ...ends(rows[k].wider), comparison.margin, each.verdict])));
  const result = el("h2", null, "Result", el("small", null, words)), paired = el("h2", null, `Paired difference to ${baseline}`,
    el("small", null, `the same seed in both; line: typical difference${comparison.margin ? "; grey: what does not matter" : ""}${rows.some((row) => row.open) ? "; hatched: cannot tell yet" : ""}${rows.some((row) => row.wider) ? "; thin: new problems" : ""}`));
  return el("div", {class: "two"},
    figureCard(result, `${comparison.metric} by condition`,
      forest(levels, {label: `${metricWords(comparison)} by condition: ${levels.map((row) => `${row.name} ${row.note}`).join("; ")}`, xTitle: comparison.metric, unit}), levelTable),
    rows.length ? figureCard(paired, `${comparison.metric} difference to ${baseline}`, forest(rows, {label: `paired differences: ${rows.map((row) => `${row.name} ${row.note}`).join("; ")}`,
      xTitle: comparison.share ? "points" : `difference in ${comparison.metric}`, unit: comparison.share ? "points" : "", zero: true, margin: comparison.margin}), apartTable)
      : el("figure", {class: "card"}, paired, el("p", {class: "state"}, "No pair of finished runs yet")));
}

export function costs(body) {
  const {comparison, cost} = body;
  const known = (cost || []).map((each, index) => ({...each, index})).filter((each) => each.seconds_per_run && (each.index === 0 || each.typical_difference !== null));
  if (known.length < 2 || !comparison) return null;
  const points = known.map((each) => {
    const condition = comparison.conditions.find((one) => one.label === each.label) || {};
    return {name: each.label, index: each.index, x: each.seconds_per_run, y: each.index === 0 ? 0 : each.typical_difference, interval: condition.difference_interval || null,
      hint: `${each.label}: ${duration(each.seconds_per_run)}, ${count(each.tokens_per_run)} tokens per run, ${difference(each.typical_difference, comparison.share)}`};
  });
  const heading = el("h2", null, "Cost against gain", el("small", null, "up: better than the baseline; right: dearer"));
  const costTable = () => table(["condition", "seconds per run", "tokens per run", "typical difference", "difference low", "difference high"],
    known.map((each, k) => [each.label, each.seconds_per_run, each.tokens_per_run, each.typical_difference, ...(points[k].interval || [null, null])]));
  const chart = gain(points, {label: `difference to the baseline by device time per run: ${points.map((each) => each.hint).join("; ")}`, xTitle: "device time per run",
      xText: (value) => value === 0 ? "0" : duration(value), yTitle: comparison.share ? "points" : "difference", unit: comparison.share ? "points" : ""});
  return figureCard(heading, `cost against gain ${comparison.metric}`, chart, costTable,
    el("div", {class: "scroll"}, el("table", {class: "tight"}, el("thead", null, el("tr", null, el("th", {scope: "col"}, "condition"),
      ["time / run", "tokens / run", "typical difference"].map((text) => el("th", {scope: "col", class: "number"}, text)))),
    el("tbody", null, known.map((each) => el("tr", null, el("td", null, name(each.label, each.index)), el("td", {class: "number"}, duration(each.seconds_per_run)),
      el("td", {class: "number"}, count(each.tokens_per_run)), el("td", {class: "number"}, each.index === 0 ? "baseline" : difference(each.typical_difference, comparison.share))))))));
}

export function seeds(body) {
  const power = Array.isArray(body.power) ? body.power : body.power ? [body.power] : [];
  const lines = power.filter((each) => each.line);
  if (!lines.length) return null;
  return el("section", {class: "card"}, el("h2", null, "How many more seeds?"),
    lines.map((each) => el("div", null, [].concat(each.line).map((text) => el("p", null, text)),
      each.toml ? el("div", {class: "toml"}, el("pre", {tabindex: "0"}, each.toml), button("Copy", () => copy(each.toml, "TOML copied"))) : null)),
    el("p", {class: "muted small"}, "Declare them as a new campaign: seeds that are added because of a result make it look surer than it is."));
}

export function runsTable(body) {
  const rows = [...body.runs].sort((a, b) => a.index - b.index || a.seed - b.seed);
  return el("section", {id: "runs"}, el("h2", null, "Runs"),
    el("div", {class: "scroll"}, el("table", {class: "tight wide"}, el("thead", null, el("tr", null,
      ["condition", "seed", "state", "steps", "changed", "look at"].map((text) => el("th", {scope: "col", class: text === "seed" || text === "steps" ? "number" : null}, text)))),
    el("tbody", null, rows.map((run) => el("tr", null,
      el("td", null, name(run.label, run.index)), el("td", {class: "number"}, run.seed),
      el("td", null, el("span", {class: `pill flush ${run.state}`}, run.state), run.reason ? el("span", {class: "small bad reason"}, run.reason) : null,
        run.worker ? el("span", {class: "small muted reason"}, `worker ${run.worker}`) : null),
      el("td", {class: "number"}, `${count(run.step)}${run.max_steps ? ` of ${count(run.max_steps)}` : ""}`,
        run.state === "running" && run.max_steps ? el("progress", {max: run.max_steps, value: run.step, "aria-label": `steps of ${run.run_id}`}) : null),
      el("td", {class: "muted"}, run.age_s === null || run.age_s === undefined ? "–" : `${duration(run.age_s)} ago`),
      el("td", {class: "links"}, el("a", {class: "open", href: link("metrics", run.place), "aria-label": `metrics of ${run.run_id}`}, "metrics"),
        el("a", {href: link("timeline", run.place), "aria-label": `timeline of ${run.run_id}`}, "timeline"),
        el("a", {href: link("notes", run.place), "aria-label": `notes and log of ${run.run_id}`}, "log"))))))));
}

export function traces(body) {
  const sums = Object.entries(body.checksums || {}).filter(([, value]) => value);
  if (!sums.length) return null;
  return el("p", {class: "muted small sums"}, sums.map(([what, value]) => el("span", null, `${what.replace(/_/g, " ")} `, typeof value === "string" ? el("code", {title: value}, value.slice(0, 16))
    : el("b", {class: "warn", title: Object.entries(value).map(([run, sum]) => `${run}: ${sum}`).join("\n")}, "differs between runs"))));
}
