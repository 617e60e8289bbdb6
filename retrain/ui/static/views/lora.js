// What the adapters learnt, by singular values: energy by rank, over checkpoints, per module; overlap between seeds.

import {Chart} from "../components/chart.js";
import {RunChoice} from "../components/inputs.js";
import {Answered, Empty, Title} from "../components/states.js";
import {Table, numberColumn} from "../components/table.js";
import {amount, number, percent, plural} from "../format.js";
import {link, useAddress} from "../lib/address.js";
import {useAnswer} from "../lib/answer.js";
import {html, useMemo} from "../lib/html.js";
import {runName} from "../names.js";

const KEPT = 0.95;
const RANKS = [1, 2, 4, 8, 16, 32, 64];
// No event names a checkpoint: while runs go on, their adapters are looked for again, but not often.
const AGAIN = {kinds: ["metrics", "evals", "state"], wait: 10000};
const BY_RANK = "share of the change's energy in its first directions, mean of the modules";
const BY_STEP = "energy in the first directions, by how many of them";

export function Lora() {
  const {place} = useAddress();
  const answer = useAnswer("lora", {at: place}, AGAIN);
  const nothing = html`<${Empty} title="No adapter to look at">
    These runs keep no LoRA adapter yet: it is written with checkpoints and at the end.
  <//>`;
  return html`<${Title} title="LoRA" words="what the adapters learnt, by singular values" />
    <${Answered} of=${answer}>
      ${(body) => (body.runs.some((run) => run.modules.length) ? html`<${Adapters} body=${body} />` : nothing)}
    <//>`;
}

function Adapters({body: {runs: all, left_out: left, overlap, directions, squeeze}}) {
  const {query} = useAddress();
  const runs = all.filter((run) => run.modules.length);
  const first = runs.find((run) => run.place === query.run) || runs[0];
  // Checkpoints are read of one run at a time.
  const whole = useAnswer("lora", all.length > 1 ? {at: first.place} : null, AGAIN);
  const run = (whole.isCurrent && whole.data.runs[0]) || first;
  return html`<div class="tools">
      <${RunChoice} runs=${runs} run=${run.place} />
      <a href=${link("lora", run.place)}>${runName(run)}, step ${run.step ?? "?"}</a>
      ${left > 0 && html`<span class="muted">${plural(left, "further run")} not read</span>`}
    </div>
    <${Energies} runs=${runs} run=${run} />
    <${Overlap} pairs=${overlap || []} runs=${runs} directions=${directions} />
    ${(squeeze || []).map((table, i) => html`<${Squeezed} table=${table} key=${i} />`)}
    <${Modules} run=${run} />`;
}

function linesByRank(runs) {
  const kind = runs.length > 4 ? "run" : "mean";
  const ranks = (run) => run.energy.map((_, i) => i + 1);
  return runs.map((run) => ({name: runName(run), index: run.index || 0, kind, x: ranks(run), y: run.energy}));
}

function linesByStep(run) {
  const checkpoints = (run.checkpoints || []).filter((each) => each.step !== null);
  const most = Math.max(0, ...checkpoints.map((each) => each.energy.length));
  const x = checkpoints.map((each) => each.step);
  const energies = (rank) => checkpoints.map((each) => each.energy[rank - 1] ?? null);
  const ranks = RANKS.filter((rank) => rank < most);
  return ranks.map((rank, i) => ({name: `rank ${rank}`, index: i, kind: "mean", x, y: energies(rank)}));
}

function Energies({runs, run}) {
  const byRank = useMemo(() => linesByRank(runs), [JSON.stringify(runs.map((each) => [each.place, each.energy]))]);
  const byStep = useMemo(() => linesByStep(run), [run]);
  const shared = {level: "h2", height: 280, share: true, unit: "%", emptyWords: "No checkpoints to compare"};
  return html`<div class="two">
    <${Chart} title="Energy by rank" words=${BY_RANK} x="rank" group="rank" lines=${byRank} ...${shared} />
    <${Chart} title="Over checkpoints" words=${BY_STEP} x="step" group="checkpoints" lines=${byStep} ...${shared} />
  </div>`;
}

function Modules({run}) {
  const ranksFor = (energy) => energy.findIndex((share) => share >= KEPT) + 1 || null;
  const rows = run.modules.map((module) => ({...module, ranks: ranksFor(module.energy)}));
  const norms = Math.max(...rows.map((row) => row.norm));
  const ranks = Math.max(1, ...rows.map((row) => row.ranks || 0));
  const kept = `${100 * KEPT} %`;
  const columns = [
    {key: "name", title: "module", head: true, cell: (row) => html`<code>${row.name}</code>`},
    numberColumn("norm", "norm", (row) => number(row.norm), {share: (row) => row.norm / (norms || 1)}),
    numberColumn("ranks", `ranks for ${kept}`, (row) => row.ranks ?? "–", {share: (row) => row.ranks / ranks}),
    numberColumn("first", "first direction", (row) => percent(row.energy[0])),
  ];
  const words = `${runName(run)}: size of the change, and how many ranks hold ${kept} of its energy`;
  const table = {label: "modules", columns, rows, keyOf: (row) => row.name};
  return html`<section>
    <h2>Modules <small>${words}</small></h2>
    <${Table} ...${table} tall=${true} region=${true} />
  </section>`;
}

function Overlap({pairs, runs, directions}) {
  if (!pairs.length) return null;
  const shown = runs.filter((run) => pairs.some((pair) => pair.a === run.place || pair.b === run.place));
  const of = (a, b) => pairs.find((pair) => [a, b].every((run) => [pair.a, pair.b].includes(run.place)) && a !== b);
  const chance = pairs.reduce((sum, pair) => sum + pair.chance, 0) / pairs.length;
  const cell = (b) => (a) =>
    of(a, b) ? of(a, b).overlap.toFixed(3) : html`<span class="muted">${a === b ? "1" : "–"}</span>`;
  const share = (b) => (a) => (of(a, b) ? of(a, b).overlap : 0);
  const column = (b) => numberColumn(b.place, runName(b), cell(b), {share: share(b)});
  const columns = [{key: "run", title: "run", head: true, cell: runName}, ...shown.map(column)];
  const words = `mean over modules of the first ${plural(directions, "direction")}; 1: the same; by chance`;
  const table = {class: "tight matrix", label: "overlap", columns, rows: shown, keyOf: (run) => run.place};
  return html`<section>
    <h2>Overlap of directions between runs <small>${words} ${number(chance, 2)}</small></h2>
    <${Table} ...${table} region=${true} />
  </section>`;
}

// What `retrain squeeze` found: what a smaller rank keeps, and what it still solves.
function Squeezed({table: {rows = [], verified, run_id: id, recommended_rank: best, source_rank: from}}) {
  if (!rows.length) return null;
  const solved = new Map((verified ? [verified.full, ...verified.ranks] : []).map((row) => [row.rank, row.accuracy]));
  const accuracy = ({rank}) => (solved.has(rank) ? amount(solved.get(rank), true) : "–");
  const columns = [
    {key: "rank", title: "rank", head: true, cell: (row) => row.rank},
    numberColumn("mean", "energy, mean", (row) => percent(row.mean_variance)),
    numberColumn("worst", "worst module", (row) => percent(row.min_variance)),
    numberColumn("error", "weight error", (row) => percent(row.relative_error)),
    ...(verified ? [numberColumn("accuracy", "held-out accuracy", accuracy)] : []),
  ];
  return html`<section>
    <h2>A smaller rank <small>${id} ${best && `rank ${best} of ${from} is recommended`}</small></h2>
    <${Table} label="smaller ranks" columns=${columns} rows=${rows} keyOf=${(row) => String(row.rank)} />
  </section>`;
}
