// Problems: held-out problems by condition, before and after training.

import {colour} from "../colours.js";
import {Chart} from "../components/chart.js";
import {AddressChoice, AddressSearch} from "../components/inputs.js";
import {Condition, Rate} from "../components/marks.js";
import {Answered, ClosableHead, Empty, Title} from "../components/states.js";
import {Table, numberColumn} from "../components/table.js";
import {difference, number, plural, shortened} from "../format.js";
import {useKeys} from "../keys.js";
import {go, link, useAddress} from "../lib/address.js";
import {useAnswer, useRuns} from "../lib/answer.js";
import {html, useMemo} from "../lib/html.js";
import {runName} from "../names.js";
import {LongText, Marked} from "./conversation.js";
import {Chips, Pager, Panes, cycled, nearestLine, usePages} from "./reading.js";

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
  const hint = fell.map(sentence).join("; ");
  return fell.length > 0 && canShow && html`<small class="muted" title=${hint}>p ${number(least, 2)}</small>`;
}

export function Problems() {
  const {place, query, patch} = useAddress();
  const {family} = useRuns(place);
  const {set, sort, tag, text, id} = query;
  const pages = usePages();
  const question = {at: place, set, sort, tag, text, first: pages.first, count: pages.count};
  const answer = useAnswer("problems", question, {kinds: ["evals"], wait: 3000});
  const {data} = answer;
  const conditions = useMemo(() => {
    const labels = data ? data.conditions : [];
    const indexOf = (label) => (family.find((run) => run.label === label) || {index: labels.indexOf(label)}).index;
    return labels.map((label) => ({label, index: indexOf(label)}));
  }, [data, family]);
  const close = () => patch({id: null});
  const compare = () => {
    const [pair] = data && id ? pairsOf({labels: data.conditions, steps: data.steps, family, place}) : [];
    if (pair) go(link("prompt", place, {split: `eval/${data.set}`, problem: id, order: sort, ...pair.sides}));
  };
  const sorts = SORTS.map(([key]) => key);
  useKeys({
    d: ["compare the answers (Same prompt)", compare],
    s: ["next order", () => patch({sort: cycled(sorts, sort || "differ", 1), first: null})],
    Escape: ["close the problem", close],
  });
  const isEvaluated = data && data.sets.length > 0;
  const words =
    isEvaluated && [data.set, plural(data.total, "problem"), plural(conditions.length, "condition")].join(" · ");
  const shared = {conditions, family, close};
  const content = () => html`<${Tools} data=${data} /><${Judgement} data=${data} />
    <${Panes} label="problems" chosen=${id !== undefined && html`<${Problem} set=${data.set} ...${shared} />`}>
      <${List} data=${data} conditions=${conditions} turn=${pages.turn} />
      <${Pager} pages=${pages} shown=${data.problems.length} total=${data.total} />
    <//>`;
  const nothing = () => html`<${Empty} title="No evaluation yet">${HINT}<//>`;
  return html`<${Title} title="Problems" words=${words} />
    <${Answered} of=${answer}>${isEvaluated ? content : nothing}<//>`;
}

function Tools({data: {sets, set, of_tag: ofTag}}) {
  const tagged = [["", "any tag"], ...Object.entries(ofTag).map(([tag, many]) => [tag, `${tag} (${many})`])];
  const setChoice = {name: "set", label: "held-out set", options: sets.map((each) => [each, each]), usual: set};
  return html`<div class="tools">
    <${AddressSearch} name="text" label="search in problems" resets=${FIRST} />
    <${AddressChoice} ...${setChoice} resets=${{first: null, id: null, tag: null}} />
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

function List({data, conditions, turn}) {
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
    const title = html`<${Condition} index=${index} label=${label} /><${EvaluatedRuns} data=${data} label=${label} />`;
    return {key: `of ${label}`, title, cell: (row) => change(row.rates[label], index, canShow)};
  };
  const columns = [{key: "problem", title: "problem", cell: name}, ...conditions.map(column)];
  const chosen = {
    selected: (row) => row.id === query.id,
    onOpen: (row, options) => patch({id: row.id}, options),
    onEnd: (by) => turn(by, data.total),
  };
  return html`<${Table} class="tight wide matrixtable" label="solve rates" noun="problem" columns=${columns}
    rows=${data.problems} keyOf=${(row) => row.id} ...${chosen} />`;
}

const SOLVE_RATE = {
  ...{title: "Solve rate", x: "step", unit: "%", share: true, height: 220, full: true, range: {min: 0, max: 1}},
  words: "over the answers of all seeds, with 95 % intervals; a click opens the answers of a step",
};

// Return what can stand side by side: the first condition and every other, then each at its first and last step.
function pairsOf({labels, steps, family, place}) {
  const run = (label) => (runOf(family, place, label) || {}).place;
  const [first, ...rest] = labels;
  const others = rest.map((label) => ({words: `${first} and ${label}`, sides: {a: run(first), b: run(label)}}));
  const changes = labels.map((label) => {
    const [before, after] = steps[label];
    const sides = {a: run(label), b: run(label), step_a: before, step_b: after};
    return {words: `${label}: step ${before} and ${after}`, sides};
  });
  return [...others, ...changes].filter(({sides: {a, b}}) => a && b);
}

function runOf(family, place, label) {
  const own = family.filter((run) => run.label === label);
  return own.find((run) => run.place === place) || own[0];
}

function Problem({set, close, ...shared}) {
  const {place, query} = useAddress();
  const answer = useAnswer("problem", {at: place, set, id: query.id}, {kinds: ["evals"], wait: 3000});
  const content = (found) => html`<${ClosableHead} title=${shortened(found.problem, 120)}
      words=${found.tags.join(" · ")} onClose=${close} />
    ${found.prompt && html`<${LongText} text=${found.prompt} most=${3000} class="said promptshort" />`}
    <${Evolution} found=${found} ...${shared} />`;
  return html`<${Answered} of=${answer}>${content}<//>`;
}

function Evolution({found, conditions, family}) {
  const {place, query} = useAddress();
  const {problem} = found;
  const split = `eval/${found.set}`;
  const lines = useMemo(() => {
    const line = ([name, points]) => {
      const {index} = conditions.find((each) => each.label === name) || {index: 0};
      const [x, y, low, high, n] = ["step", "rate", "low", "high", "n"].map((key) => points.map((each) => each[key]));
      return {name, index, kind: "mean", sparse: true, x, y, low, high, answers: n};
    };
    return Object.entries(found.conditions).map(line);
  }, [found, conditions]);
  const counts = useMemo(() => lines.map(({index, x, answers: n}) => ({index, x, n})), [lines]);
  const labels = lines.map(({name}) => name);
  const steps = Object.fromEntries(lines.map(({name, x}) => [name, [x[0], x[x.length - 1]]]));
  const run = (label) => runOf(family, place, label);
  const answers = (label, iteration) => run(label) && link("rollouts", run(label).place, {split, problem, iteration});
  const open = (step, y) => {
    const href = answers(nearestLine(lines, step, y).name, step);
    if (href) go(href);
  };
  const options = {...SOLVE_RATE, counts, lines, onStep: open};
  const compared = ({words, sides}) => {
    const href = link("prompt", place, {...sides, split, problem, order: query.sort});
    return html`<li key=${words}><a href=${href}>${words}</a></li>`;
  };
  const own = (label) => html`<li key=${label}><a href=${answers(label, null)}>${runName(run(label))}</a></li>`;
  const rows = Object.entries(found.conditions).flatMap(([label, points]) =>
    points.map((each) => ({...each, label})),
  );
  const columns = [
    {key: "condition", title: "condition", cell: ({label}) => label},
    numberColumn("step", "step", ({label, step}) => html`<a href=${answers(label, step)}>${step}</a>`),
    {key: "solved", title: "solved", cell: (row) => html`<${Rate} ...${row} />`},
  ];
  return html`<${Chart} ...${options} />
    <h3>Same prompt, side by side</h3>
    <ul class="plain">${pairsOf({labels, steps, family, place}).map(compared)}</ul>
    <h3>All answers</h3>
    <ul class="plain">${labels.filter(run).map(own)}</ul>
    <details>
      <summary class="muted small">as a table</summary>
      <${Table} label="rates" columns=${columns} rows=${rows} keyOf=${({label, step}) => `${label} ${step}`} />
    </details>`;
}
