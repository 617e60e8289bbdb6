// Problems: held-out problems by condition, before and after training.

import {colour} from "../colours.js";
import {AddressChoice, AddressSearch} from "../components/inputs.js";
import {Condition, Rate} from "../components/marks.js";
import {Answered, Empty, Title} from "../components/states.js";
import {Table} from "../components/table.js";
import {difference, number, plural, shortened} from "../format.js";
import {useKeys} from "../keys.js";
import {go, link, useAddress} from "../lib/address.js";
import {useAnswer, useRuns} from "../lib/answer.js";
import {html, useMemo} from "../lib/html.js";
import {Marked} from "./conversation.js";
import {Problem, pairsOf} from "./problem.js";
import {Chips, NO_ROWS, Pager, cycled, useNextRow} from "./reading.js";

const PAGE = 100;
const FIRST = {first: null};
const SORTS = [
  ["differ", "conditions differ most"],
  ["worse", "got worse"],
  ["better", "got better"],
  ["hard", "hardest"],
  ["problem", "as they come"],
];
const THAN = {before: "worse than before", baseline: "worse than the baseline"};
const HINT =
  "Held-out problems appear here with the first evaluation ([evaluation] problems, [training] eval_every).";
const RATES =
  "Each rate stands with its 95 % interval (Wilson) and its number of answers. p is of the exact test over seeds " +
  "that the problem got worse.";

// Two rates with their intervals, before above after.
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

// What the tests over seeds say of a problem under a condition. `canShow`: whether they can show anything at all.
function Tests({tests, canShow}) {
  const sentence = ([against, {change, n, p, holm}]) =>
    `${difference(change, true)} points, ${THAN[against]}: p ${number(p, 2)} over ${plural(n, "run")}, ` +
    `${number(holm, 2)} corrected for all problems`;
  const all = Object.entries(tests);
  const worse = all.filter(([, test]) => test.worse);
  const pill = ([against, test]) => html`<span class="pill failed" key=${against} title=${sentence([against, test])}>
    ▼ ${THAN[against]}, p ${number(test.holm, 2)}
  </span>`;
  if (worse.length) return worse.map(pill);
  const fell = all.filter(([, test]) => test.change < 0);
  const least = Math.min(...fell.map(([, test]) => test.p));
  const words = html`<small class="muted" title=${fell.map(sentence).join("; ")}>p ${number(least, 2)}</small>`;
  return fell.length > 0 && canShow && words;
}

export function Problems() {
  const {place, query, patch} = useAddress();
  const {family} = useRuns(place);
  const {set, sort, tag, text, id} = query;
  const first = Math.max(0, Number(query.first) || 0);
  const question = {at: place, set, sort, tag, text, first, count: PAGE};
  const answer = useAnswer("problems", question, {kinds: ["evals"], wait: 3000});
  const {data, isCurrent} = answer;
  const conditions = useMemo(() => {
    const labels = data ? data.conditions : [];
    const indexOf = (label) => (family.find((run) => run.label === label) || {index: labels.indexOf(label)}).index;
    return labels.map((label) => ({label, index: indexOf(label)}));
  }, [data, family]);
  const [rows, total] = data ? [data.problems, data.total] : [NO_ROWS, 0];
  const choose = (to, options) => patch({id: to}, options);
  const next = useNextRow({rows, total, isCurrent, first, page: PAGE}, "id", id ?? null, choose);
  const compare = () => {
    const [pair] = data && id ? pairsOf({labels: data.conditions, steps: data.steps, family, place}) : [];
    if (pair) go(link("prompt", place, {split: `eval/${data.set}`, problem: id, order: sort, ...pair.sides}));
  };
  const sorts = SORTS.map(([key]) => key);
  useKeys({
    j: ["next problem", next(1)],
    k: ["previous problem", next(-1)],
    d: ["compare the answers (Same prompt)", compare],
    s: ["next order", () => patch({sort: cycled(sorts, sort || "differ", 1), first: null})],
    Escape: ["close the problem", () => patch({id: null})],
  });
  const isEvaluated = data && data.sets.length > 0;
  const words =
    isEvaluated && [data.set, plural(total, "problem"), plural(conditions.length, "condition")].join(" · ");
  const close = () => patch({id: null});
  const content = () => html`<${Tools} data=${data} /><${Judgement} data=${data} />
    <div class=${`panes ${id === undefined ? "" : "opened"}`}>
      <section class="list" aria-label="problems">
        <${List} data=${data} conditions=${conditions} />
        <${Pager} first=${first} page=${PAGE} shown=${rows.length} total=${total} />
      </section>
      <aside class="beside" aria-label="the chosen problem">
        ${id !== undefined && html`<${Problem} set=${data.set} ...${{conditions, family, close}} />`}
      </aside>
    </div>`;
  const nothing = () => html`<${Empty} title="No evaluation yet">${HINT}<//>`;
  return html`<${Title} title="Problems" words=${words} />
    <${Answered} of=${answer}>${isEvaluated ? content : nothing}<//>`;
}

function Tools({data: {sets, set, of_tag: ofTag}}) {
  const same = sets.map((each) => [each, each]);
  const tagged = [["", "any tag"], ...Object.entries(ofTag).map(([tag, many]) => [tag, `${tag} (${many})`])];
  const other = {first: null, id: null, tag: null};
  return html`<div class="tools">
    <${AddressSearch} name="text" label="search in problems" resets=${FIRST} />
    <${AddressChoice} name="set" label="held-out set" options=${same} usual=${set} resets=${other} />
    <${AddressChoice} name="sort" label="sort" options=${SORTS} resets=${FIRST} />
    <${AddressChoice} name="tag" label="tag" options=${tagged} resets=${FIRST} />
  </div>`;
}

// Whether problems got worse, as tested over seeds, and what these tests can show.
function Judgement({data: {tests, few, overall}}) {
  const worse = tests.some((test) => test.worse);
  const many = Math.max(0, ...Object.values(overall).map((each) => each.after.n || each.before.n));
  const chance = tests.some((test) => test.can_show)
    ? "No problem got worse beyond chance"
    : "Too few runs to tell whether a problem got worse";
  const none = `${plural(many, "problem")}: too few for a percentage over all`;
  return html`<details class="judgement small" open=${worse}>
    <summary><b>${worse ? "Some problems got worse" : chance}</b>${few && ` · ${none}`}</summary>
    <ul class="plain">${tests.map(({label, against, words}) => html`<li key=${label + against}>${words}</li>`)}</ul>
    <p class="muted">${RATES}</p>
  </details>`;
}

// In a column's head: at which steps, of which runs, and all problems together.
function EvaluatedRuns({data: {taken, overall, few}, label}) {
  const {before, after, of, runs} = taken[label];
  const later = after.length ? ` → ${after.join(", ")}` : ", none after it";
  const unfinished = of === "all" ? `; ${plural(runs, "unfinished run")}` : "";
  const ends = overall[label];
  const all = html`<span class="all">all: <${Rate} ...${ends.before} /> ${"→ "}<${Rate} ...${ends.after} /></span>`;
  return html`<small>step ${before.join(", ")}${later}${unfinished}</small>${!few && all}`;
}

function List({data, conditions}) {
  const {query, patch, linkTo} = useAddress();
  if (!data.problems.length) {
    return html`<${Empty} title="No problem passes these filters">Take the tag or the words of the search away.<//>`;
  }
  const name = ({id, prompt, tags}) =>
    html`<a class="quiet" href=${linkTo({id})} title=${id} dir="auto"
        ><${Marked} text=${shortened(prompt || id, 130)} search=${query.text} /></a
      ><${Chips} tags=${tags} />`;
  const change = ({rates, tests}, index, canShow) => html`<div class="change">
    <${Intervals} ...${rates} index=${index} /><${Rate} ...${rates.before} />
    <span class="to"><span class="muted">→</span> <${Rate} ...${rates.after} /></span>
    <${Tests} tests=${tests} canShow=${canShow} />
  </div>`;
  const column = ({label, index}) => {
    const canShow = data.tests.some((test) => test.label === label && test.can_show);
    const title = html`<${Condition} index=${index}>${label}<//><${EvaluatedRuns} data=${data} label=${label} />`;
    return {key: `of ${label}`, title, cell: (row) => change(row.rates[label], index, canShow)};
  };
  const columns = [{key: "problem", title: "problem", cell: name}, ...conditions.map(column)];
  const table = {
    class: "tight wide matrixtable",
    label: "solve rates",
    columns,
    rows: data.problems,
    keyOf: (row) => row.id,
  };
  const chosen = {onOpen: (row) => patch({id: row.id}), selected: (row) => row.id === query.id};
  return html`<${Table} ...${table} ...${chosen} />`;
}
