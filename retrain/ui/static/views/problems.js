// Problems: held-out problems by condition, before and after training, and how one of them evolved.

import {colour} from "../colours.js";
import {Chart} from "../components/chart.js";
import {Choice, SearchField} from "../components/inputs.js";
import {Condition, Rate} from "../components/marks.js";
import {Answered, Empty, Failed, Loading} from "../components/states.js";
import {DataTable} from "../components/data_table.js";
import {Table} from "../components/table.js";
import {difference, number, plural, shortened} from "../format.js";
import {useKeys} from "../keys.js";
import {useAddress} from "../lib/address.js";
import {useAnswer} from "../lib/answer.js";
import {useRuns} from "../lib/campaign.js";
import {html, useMemo} from "../lib/html.js";
import {runName} from "../names.js";
import {go, link} from "../router.js";
import {LongText, Marked} from "./conversation.js";
import {Chips, NO_ROWS, Pager, useNextRow} from "./reading.js";

const PAGE = 100;
const RANGE = {min: 0, max: 1};
/** @type {[string, string][]} */
const SORTS = [
  ["differ", "conditions differ most"],
  ["worse", "got worse"],
  ["better", "got better"],
  ["hard", "hardest"],
  ["problem", "as they come"],
];
const THAN = /** @type {Record<string, string>} */ ({
  before: "worse than before",
  baseline: "worse than the baseline",
});

/**
 * @typedef {{rate: number | null, n: number, low: number | null, high: number | null}} RateOf as the server computes it
 * @typedef {{label: string, index: number}} Shown a condition and its colour
 */

/** Two rates with their intervals, before above after. @param {{before: RateOf, after: RateOf, index: number}} props */
function Intervals({before, after, index}) {
  const x = (share) => 3 + 54 * share;
  const bar = ({rate, low, high}, y, paint) =>
    rate !== null &&
    html`<line x1=${x(low)} x2=${x(high)} y1=${y} y2=${y} stroke=${paint} stroke-width="2" />
      <circle cx=${x(rate)} cy=${y} r="2.6" fill=${paint} />`;
  return html`<svg class="intervals" viewBox="0 0 60 18" width="60" height="18" aria-hidden="true">
    <line class="grid" x1="3" x2="57" y1="9" y2="9" />${bar(before, 5, "var(--muted)")}${bar(after, 13, colour(index))}
  </svg>`;
}

/** @param {{rate: RateOf}} props */
function RateText({rate: {rate, n, low, high}}) {
  return html`<${Rate} value=${rate} n=${n} low=${low} high=${high} />`;
}

/**
 * What the tests over seeds say of a problem under a condition.
 * @param {{tests: Record<string, any>, canShow: boolean}} props `canShow`: whether they can show anything at all
 */
function Tests({tests, canShow}) {
  const sentence = ([against, {change, n, p, holm}]) =>
    `${difference(change, true)} points, ${THAN[against]}: p ${number(p, 2)} over ${plural(n, "run")}, ` +
    `${number(holm, 2)} corrected for all problems`;
  const all = Object.entries(tests);
  const worse = all.filter(([, test]) => test.worse);
  if (worse.length) {
    return worse.map(
      (each) => html`<span class="pill failed" key=${each[0]} title=${sentence(each)}>
        ▼ ${THAN[each[0]]}, p ${number(each[1].holm, 2)}
      </span>`,
    );
  }
  const fell = all.filter(([, test]) => test.change < 0);
  if (!fell.length || !canShow) return null;
  const least = Math.min(...fell.map(([, test]) => test.p));
  return html`<small class="muted" title=${fell.map(sentence).join("; ")}>p ${number(least, 2)}</small>`;
}

/** @param {{cell: any, index: number, canShow: boolean}} props */
function Change({cell: {rates, tests}, index, canShow}) {
  return html`<div class="change">
    <${Intervals} ...${rates} index=${index} />
    <${RateText} rate=${rates.before} />
    <span class="to"><span class="muted">→</span> <${RateText} rate=${rates.after} /></span>
    <${Tests} tests=${tests} canShow=${canShow} />
  </div>`;
}

export function Problems() {
  const {place, query, patch} = useAddress();
  const {family} = useRuns(place);
  const {set, sort, tag, text} = query;
  const first = Math.max(0, Number(query.first) || 0);
  const question = {at: place, set, sort, tag, text, first, count: PAGE};
  const answer = useAnswer("problems", question, {kinds: ["evals"], wait: 3000});
  const {data, isCurrent} = answer;
  const conditions = useMemo(() => {
    const labels = data ? data.conditions : [];
    const indexOf = (label) => (family.find((run) => run.label === label) || {index: labels.indexOf(label)}).index;
    return labels.map((label) => ({label, index: indexOf(label)}));
  }, [data, family]);
  useProblemKeys({data, isCurrent, first, query, patch, family, place});
  const title = (words) => html`<div class="title"><h1>Problems</h1><p class="muted">${words}</p></div>`;
  if (data === null || (answer.error && !isCurrent)) {
    const {error, retry} = answer;
    return html`${title("")}${error ? html`<${Failed} error=${error} retry=${retry} />` : html`<${Loading} />`}`;
  }
  if (!data.sets.length) {
    const hint =
      "Held-out problems appear here with the first evaluation ([evaluation] problems, [training] eval_every).";
    return html`${title("")}<${Empty} title="No evaluation yet">${hint}<//>`;
  }
  const words = [data.set, plural(data.total, "problem"), plural(conditions.length, "condition")].join(" · ");
  const pages = {first, page: PAGE, shown: data.problems.length, total: data.total};
  return html`${title(words)}<${Tools} data=${data} /><${Judgement} data=${data} />
    <div class=${`panes ${query.id === undefined ? "" : "opened"}`}>
      <section class="list" aria-label="problems">
        <${List} data=${data} conditions=${conditions} />
        <${Pager} ...${pages} onFirst=${(to) => patch({first: to})} />
      </section>
      <aside class="beside" aria-label="the chosen problem">
        ${query.id !== undefined && html`<${Problem} set=${data.set} conditions=${conditions} family=${family} />`}
      </aside>
    </div>`;
}

function useProblemKeys({data, isCurrent, first, query, patch, family, place}) {
  const list = {rows: data ? data.problems : NO_ROWS, total: data ? data.total : 0, isCurrent, first, page: PAGE};
  const next = useNextRow(list, "id", query.id ?? null, (id, options) => patch({id}, options));
  const compare = () => {
    if (!data || query.id === undefined) return;
    const [pair] = pairsOf({labels: data.conditions, steps: data.steps, family, place});
    const {words, ...sides} = pair || {words: ""};
    const about = {split: `eval/${data.set}`, problem: query.id, order: query.sort};
    if (words) go(link("prompt", place, {...about, ...sides}));
  };
  const sorts = SORTS.map(([key]) => key);
  const order = sorts[(sorts.indexOf(query.sort || "differ") + 1) % sorts.length];
  useKeys({
    j: ["next problem", next(1)],
    k: ["previous problem", next(-1)],
    d: ["compare the answers (Same prompt)", compare],
    s: ["next order", () => patch({sort: order, first: null})],
    Escape: ["close the problem", () => patch({id: null})],
  });
}

/** @param {{data: any}} props */
function Tools({data: {sets, set, tags, of_tag: ofTag}}) {
  const {query, patch} = useAddress();
  const choose = (key) => (value) => patch({[key]: value || null, first: null});
  const same = sets.map((each) => [each, each]);
  const tagged = [["", "any tag"], ...tags.map((each) => [each, `${each} (${ofTag[each]})`])];
  const other = (value) => patch({set: value, first: null, id: null, tag: null});
  return html`<div class="tools">
    <${SearchField}
      label="search in problems"
      value=${query.text || ""}
      wait=${250}
      onSearch=${(text) => patch({text: text || null, first: null}, {replace: true})}
    />
    ${sets.length > 1 && html`<${Choice} label="held-out set" options=${same} value=${set} onChoose=${other} />`}
    <${Choice}
      label="sort"
      options=${SORTS}
      value=${query.sort || "differ"}
      onChoose=${(value) => choose("sort")(value === "differ" ? null : value)}
    />
    ${
      tags.length > 0 &&
      html`<${Choice} label="tag" options=${tagged} value=${query.tag || ""} onChoose=${choose("tag")} />`
    }
  </div>`;
}

/** Whether problems got worse, as tested over seeds, and what these tests can show. @param {{data: any}} props */
function Judgement({data: {tests, few, of_tag: ofTag, overall}}) {
  const worse = tests.reduce((sum, test) => sum + test.worse, 0);
  const canShow = tests.some((test) => test.can_show);
  const many = Math.max(0, ...Object.values(overall).map((each) => each.after.n || each.before.n));
  const head = worse
    ? "Some problems got worse"
    : canShow
      ? "No problem got worse beyond chance"
      : "Too few runs to tell whether a problem got worse";
  return html`<details class="judgement small" open=${worse > 0}>
    <summary><b>${head}</b>${few && html` · ${plural(many, "problem")}: too few for a percentage over all`}</summary>
    <ul class="plain">${tests.map(({label, against, words}) => html`<li key=${label + against}>${words}</li>`)}</ul>
    <p class="muted">
      Each rate stands with its 95 % interval (Wilson) and its number of answers. p is of the exact test over seeds that
      the problem got worse.
    </p>
  </details>`;
}

/**
 * In a column's head: at which steps, of which runs, and all problems together.
 * @param {{data: any, label: string}} props
 */
function Taken({data: {taken, overall, few}, label}) {
  const {before, after, of, runs} = taken[label];
  const later = after.length ? ` → ${after.join(", ")}` : ", none after it";
  const unfinished = of === "all" ? `; ${plural(runs, "unfinished run")}` : "";
  const ends = overall[label];
  const all = html`<span class="all">
    all: <${RateText} rate=${ends.before} /> ${"→ "}<${RateText} rate=${ends.after} />
  </span>`;
  return html`<small>step ${before.join(", ")}${later}${unfinished}</small>${!few && all}`;
}

/** @param {{data: any, conditions: Shown[]}} props */
function List({data, conditions}) {
  const {query, patch, linkTo} = useAddress();
  if (!data.problems.length) {
    return html`<${Empty} title="No problem passes these filters">Take the tag or the words of the search away.<//>`;
  }
  const name = ({id, prompt, tags}) =>
    html`<a class="quiet" href=${linkTo({id})} title=${id} dir="auto"
        ><${Marked} text=${shortened(prompt || id, 130)} search=${query.text} /></a
      ><${Chips} tags=${tags} />`;
  const canShow = (label) => data.tests.some((test) => test.label === label && test.can_show);
  const column = ({label, index}) => ({
    key: `of ${label}`,
    title: html`<${Condition} index=${index}>${label}<//><${Taken} data=${data} label=${label} />`,
    cell: (row) => html`<${Change} cell=${row.rates[label]} index=${index} canShow=${canShow(label)} />`,
  });
  return html`<${DataTable}
    class="tight wide matrixtable"
    label="solve rates"
    columns=${[{key: "problem", title: "problem", cell: name}, ...conditions.map(column)]}
    rows=${data.problems}
    keyOf=${(row) => row.id}
    onOpen=${(row) => patch({id: row.id})}
    selected=${(row) => row.id === query.id}
  />`;
}

/**
 * Return what can stand side by side: the first condition and every other, then each at its first and last step.
 * @param {{labels: string[], steps: Record<string, number[]>, family: any[], place: string}} options
 */
function pairsOf({labels, steps, family, place}) {
  const run = (label) => runOf(family, place, label);
  const others = labels
    .slice(1)
    .map((label) => ({words: `${labels[0]} and ${label}`, a: run(labels[0]), b: run(label)}));
  const changes = labels.map((label) => {
    const [before, after] = steps[label];
    const both = {a: run(label), b: run(label), step_a: before, step_b: after};
    return {words: `${label}: step ${before} and ${after}`, ...both};
  });
  return [...others, ...changes]
    .filter(({a, b}) => a && b)
    .map(({a, b, ...rest}) => ({...rest, a: a.place, b: b.place}));
}

function runOf(family, place, label) {
  const own = family.filter((run) => run.label === label);
  return own.find((run) => run.place === place) || own[0];
}

/** @param {{set: string, conditions: Shown[], family: any[]}} props */
function Problem({set, conditions, family}) {
  const {place, query, patch} = useAddress();
  const answer = useAnswer("problem", {at: place, set, id: query.id}, {kinds: ["evals"], wait: 3000});
  return html`<${Answered} of=${answer}>
    ${(found) =>
      html`<div class="head">
          <h2>${shortened(found.problem, 120)}<small>${found.tags.join(" · ")}</small></h2>
          <button type="button" onClick=${() => patch({id: null})}>Close</button>
        </div>
        ${found.prompt && html`<${LongText} text=${found.prompt} most=${3000} class="said promptshort" />`}
        <${Evolution} found=${found} conditions=${conditions} family=${family} />`}
  <//>`;
}

/** @param {{found: any, conditions: Shown[], family: any[]}} props */
function Evolution({found, conditions, family}) {
  const {place, query} = useAddress();
  const split = `eval/${found.set}`;
  const labels = Object.keys(found.conditions);
  const lines = useMemo(() => {
    const indexOf = (label) => (conditions.find((each) => each.label === label) || {index: 0}).index;
    return labels.map((label) => {
      const column = (key) => found.conditions[label].map((each) => each[key]);
      const [x, y, low, high] = ["step", "rate", "low", "high"].map(column);
      return {name: label, index: indexOf(label), kind: "mean", sparse: true, x, y, low, high};
    });
  }, [found, conditions]);
  const counts = useMemo(() => {
    const answers = (name) => found.conditions[name].map((each) => each.n);
    return lines.map(({name, index, x}) => ({index, x, n: answers(name)}));
  }, [lines]);
  const ends = (points) => [points[0].step, points[points.length - 1].step];
  const steps = Object.fromEntries(labels.map((label) => [label, ends(found.conditions[label])]));
  const answersAt = (run, step) => link("rollouts", run, {split, problem: found.problem, iteration: step});
  const run = (label) => runOf(family, place, label);
  // The condition whose rate lies nearest to where the chart was clicked.
  const open = (step, y) => {
    const far = ({x, y: rates}) => (x.includes(step) ? Math.abs(rates[x.indexOf(step)] - y) : Infinity);
    const nearest = lines.reduce((best, line) => (far(line) < far(best) ? line : best));
    const own = run(nearest.name);
    if (own) go(answersAt(own.place, step));
  };
  const options = {x: "step", unit: "%", share: true, height: 220, full: true, range: RANGE, counts};
  const words = "over the answers of all seeds, with 95 % intervals; a click opens the answers of a step";
  const compared = ({words: text, ...sides}) => {
    const about = {split, problem: found.problem, order: query.sort};
    return html`<li key=${text}><a href=${link("prompt", place, {...sides, ...about})}>${text}</a></li>`;
  };
  const answers = (each) =>
    html`<li key=${each.place}><a href=${answersAt(each.place, null)}>${runName(each)}</a></li>`;
  return html`<${Chart} title="Solve rate" words=${words} lines=${lines} ...${options} onStep=${open} />
    <h3>Same prompt, side by side</h3>
    <ul class="plain">${pairsOf({labels, steps, family, place}).map(compared)}</ul>
    <h3>All answers</h3>
    <ul class="plain">${labels.map(run).filter(Boolean).map(answers)}</ul>
    <${RatesTable} found=${found} href=${(label, step) => run(label) && answersAt(run(label).place, step)} />`;
}

/** @param {{found: any, href: (label: string, step: number) => string | undefined}} props */
function RatesTable({found, href}) {
  const rows = Object.entries(found.conditions).flatMap(([label, points]) =>
    points.map((each) => ({...each, label})),
  );
  const step = ({label, step: number}) => html`<a href=${href(label, number)}>${number}</a>`;
  const columns = [
    {key: "condition", title: "condition", cell: (row) => row.label},
    {key: "step", title: "step", number: true, cell: step},
    {key: "solved", title: "solved", cell: (row) => html`<${RateText} rate=${row} />`},
  ];
  return html`<details>
    <summary class="muted small">as a table</summary>
    <${Table} label="rates" columns=${columns} rows=${rows} keyOf=${(row) => `${row.label} ${row.step}`} />
  </details>`;
}
