// One held-out problem: its solve rate over training by condition, and the ways to its answers.

import {Chart} from "../components/chart.js";
import {Rate} from "../components/marks.js";
import {Answered, ClosableHead} from "../components/states.js";
import {Table, numberColumn} from "../components/table.js";
import {shortened} from "../format.js";
import {go, link, useAddress} from "../lib/address.js";
import {useAnswer} from "../lib/answer.js";
import {html, useMemo} from "../lib/html.js";
import {runName} from "../names.js";
import {LongText} from "./conversation.js";
import {nearestLine} from "./reading.js";

const RANGE = {min: 0, max: 1};
const WORDS = "over the answers of all seeds, with 95 % intervals; a click opens the answers of a step";

/**
 * Return what can stand side by side: the first condition and every other, then each at its first and last step.
 * @returns {{words: string, sides: Record<string, any>}[]}
 */
export function pairsOf({labels, steps, family, place}) {
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

export function Problem({set, close, ...shared}) {
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
  const [lines, counts] = useMemo(() => {
    const line = ([name, points]) => {
      const {index} = conditions.find((each) => each.label === name) || {index: 0};
      const [x, y, low, high, n] = ["step", "rate", "low", "high", "n"].map((key) => points.map((each) => each[key]));
      return {name, index, kind: /** @type {const} */ ("mean"), sparse: true, x, y, low, high, counts: n};
    };
    const all = Object.entries(found.conditions).map(line);
    return [all, all.map(({index, x, counts: n}) => ({index, x, n}))];
  }, [found, conditions]);
  const labels = lines.map(({name}) => name);
  const steps = Object.fromEntries(lines.map(({name, x}) => [name, [x[0], x[x.length - 1]]]));
  const run = (label) => runOf(family, place, label);
  const answers = (label, iteration) => run(label) && link("rollouts", run(label).place, {split, problem, iteration});
  const open = (step, y) => {
    const href = answers(nearestLine(lines, step, y).name, step);
    if (href) go(href);
  };
  const options = {
    x: "step",
    unit: "%",
    share: true,
    height: 220,
    full: true,
    range: RANGE,
    counts,
    lines,
    onStep: open,
  };
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
  return html`<${Chart} title="Solve rate" words=${WORDS} ...${options} />
    <h3>Same prompt, side by side</h3>
    <ul class="plain">${pairsOf({labels, steps, family, place}).map(compared)}</ul>
    <h3>All answers</h3>
    <ul class="plain">${labels.filter(run).map(own)}</ul>
    <details>
      <summary class="muted small">as a table</summary>
      <${Table} label="rates" columns=${columns} rows=${rows} keyOf=${({label, step}) => `${label} ${step}`} />
    </details>`;
}
