// What the adapters learnt, by singular values: energy by rank, over checkpoints, per module; overlap between seeds.

import {Chart} from "../components/chart.js";
import {Choice} from "../components/inputs.js";
import {Answered, Empty} from "../components/states.js";
import {amount, number, percent, plural} from "../format.js";
import {useAddress} from "../lib/address.js";
import {useAnswer} from "../lib/answer.js";
import {html, useMemo} from "../lib/html.js";
import {runName} from "../names.js";
import {link} from "../router.js";

const KEPT = 0.95;
const RANKS = [1, 2, 4, 8, 16, 32, 64];
// No event names a checkpoint: while runs go on, their adapters are looked for again, but not often.
const AGAIN = {kinds: ["metrics", "evals", "state"], wait: 10000};
const BY_RANK = "share of the change's energy in its first directions, mean of the modules";
const BY_STEP = "energy in the first directions, by how many of them";

/** @typedef {import("../charts/data.js").Line} Line */

export function Lora() {
  const {place} = useAddress();
  const answer = useAnswer("lora", {at: place}, AGAIN);
  return html`<div class="title">
      <h1>LoRA</h1>
      <p class="muted">what the adapters learnt, by singular values</p>
    </div>
    <${Answered} of=${answer}>
      ${(body) =>
        body.runs.some((run) => run.modules.length)
          ? html`<${Adapters} body=${body} />`
          : html`<${Empty} title="No adapter to look at">
              These runs keep no LoRA adapter yet: it is written with checkpoints and at the end.
            <//>`}
    <//>`;
}

/** @param {{body: any}} props */
function Adapters({body}) {
  const {query, patch} = useAddress();
  const runs = body.runs.filter((run) => run.modules.length);
  const first = runs.find((run) => run.place === query.run) || runs[0];
  // Checkpoints are read of one run at a time.
  const several = body.runs.length > 1;
  const whole = useAnswer("lora", several ? {at: first.place} : null, AGAIN);
  const run = (whole.about === whole.question && whole.data && whole.data.runs[0]) || first;
  const options = runs.map((each) => [each.place, runName(each)]);
  const choose = (value) => patch({run: value});
  return html`<div class="tools">
      ${runs.length > 1 && html`<${Choice} label="run" options=${options} value=${run.place} onChoose=${choose} />`}
      <a href=${link("lora", run.place)}>${runName(run)}, step ${run.step ?? "?"}</a>
      ${body.left_out > 0 && html`<span class="muted">${plural(body.left_out, "further run")} not read</span>`}
    </div>
    <${Energies} runs=${runs} run=${run} />
    <${Overlap} pairs=${body.overlap || []} runs=${runs} directions=${body.directions} />
    ${(body.squeeze || []).map((table, i) => html`<${Squeezed} table=${table} key=${i} />`)}
    <${Modules} run=${run} />`;
}

/** @returns {Line[]} */
function linesByRank(runs) {
  const kind = runs.length > 4 ? "run" : "mean";
  const ranks = (run) => run.energy.map((_, i) => i + 1);
  return runs.map((run) => ({name: runName(run), index: run.index || 0, kind, x: ranks(run), y: run.energy}));
}

/** @returns {Line[]} */
function linesByStep(run) {
  const checkpoints = (run.checkpoints || []).filter((each) => each.step !== null);
  const most = Math.max(0, ...checkpoints.map((each) => each.energy.length));
  const x = checkpoints.map((each) => each.step);
  const energies = (rank) => checkpoints.map((each) => each.energy[rank - 1] ?? null);
  const ranks = RANKS.filter((rank) => rank < most);
  return ranks.map((rank, i) => ({name: `rank ${rank}`, index: i, kind: "mean", x, y: energies(rank)}));
}

/** @param {{runs: any[], run: any}} props */
function Energies({runs, run}) {
  const byRank = useMemo(() => linesByRank(runs), [JSON.stringify(runs.map((each) => [each.place, each.energy]))]);
  const byStep = useMemo(() => linesByStep(run), [run]);
  const shared = {level: "h2", height: 280, share: true, unit: "%"};
  return html`<div class="two">
    <${Chart} title="Energy by rank" words=${BY_RANK} x="rank" group="rank" lines=${byRank} ...${shared} />
    <${Chart}
      title="Over checkpoints"
      words=${BY_STEP}
      x="step"
      group="checkpoints"
      lines=${byStep}
      emptyWords="No checkpoints to compare"
      ...${shared}
    />
  </div>`;
}

/**
 * A cell whose tint says how much; the number says it too.
 * @param {{value: number | null, most: number, children?: any}} props
 */
function Tinted({value, most, children}) {
  const much = Math.round(45 * Math.max(0, Math.min(1, (value || 0) / (most || 1))));
  return html`<td class="number tint" style=${{"--much": `${much}%`}}>${children}</td>`;
}

/**
 * A table with a name and numbers in each row.
 * @param {{first?: string, heads: string[], class?: string, children?: any}} props
 */
function NumberTable({first, heads, class: name = "tight", children}) {
  return html`<table class=${name}>
    <thead>
      <tr>
        ${first ? html`<th scope="col">${first}</th>` : html`<td />`}
        ${heads.map((text) => html`<th scope="col" class="number" key=${text}>${text}</th>`)}
      </tr>
    </thead>
    <tbody>
      ${children}
    </tbody>
  </table>`;
}

/** @param {{run: any}} props */
function Modules({run}) {
  const ranksFor = (energy) => energy.findIndex((share) => share >= KEPT) + 1 || null;
  const rows = run.modules.map((module) => ({...module, ranks: ranksFor(module.energy)}));
  const norms = Math.max(...rows.map((row) => row.norm));
  const ranks = Math.max(...rows.map((row) => row.ranks || 0));
  const head = `ranks for ${100 * KEPT} %`;
  const row = (module) =>
    html`<tr key=${module.name}>
      <th scope="row"><code>${module.name}</code></th>
      <${Tinted} value=${module.norm} most=${norms}>${number(module.norm)}<//>
      <${Tinted} value=${module.ranks} most=${ranks}>${module.ranks ?? "–"}<//>
      <td class="number">${percent(module.energy[0])}</td>
    </tr>`;
  const words = `${runName(run)}: size of the change, and how many ranks hold ${100 * KEPT} % of its energy`;
  return html`<section>
    <h2>Modules <small>${words}</small></h2>
    <div class="scroll tall" tabindex="0" role="region" aria-label="modules">
      <${NumberTable} first="module" heads=${["norm", head, "first direction"]}>${rows.map(row)}<//>
    </div>
  </section>`;
}

/** @param {{pairs: any[], runs: any[], directions: number}} props */
function Overlap({pairs, runs, directions}) {
  if (!pairs.length) return null;
  const shown = runs.filter((run) => pairs.some((pair) => pair.a === run.place || pair.b === run.place));
  const byPlaces = new Map(
    pairs.flatMap((pair) => [
      [`${pair.a} ${pair.b}`, pair],
      [`${pair.b} ${pair.a}`, pair],
    ]),
  );
  const chance = pairs.reduce((sum, pair) => sum + pair.chance, 0) / pairs.length;
  const cell = (a, b) => {
    const pair = byPlaces.get(`${a.place} ${b.place}`);
    if (!pair) return html`<td class="number muted" key=${b.place}>${a === b ? "1" : "–"}</td>`;
    return html`<${Tinted} value=${pair.overlap} most=${1} key=${b.place}>${pair.overlap.toFixed(3)}<//>`;
  };
  const row = (a) =>
    html`<tr key=${a.place}>
      <th scope="row">${runName(a)}</th>
      ${shown.map((b) => cell(a, b))}
    </tr>`;
  const counted = plural(directions, "direction");
  return html`<section>
    <h2>
      Overlap of directions between runs
      <small>mean over modules of the first ${counted}; 1: the same; by chance ${number(chance, 2)}</small>
    </h2>
    <div class="scroll" tabindex="0" role="region" aria-label="overlap">
      <${NumberTable} class="tight matrix" heads=${shown.map(runName)}>${shown.map(row)}<//>
    </div>
  </section>`;
}

/**
 * What `retrain squeeze` found: what a smaller rank keeps, and what it still solves.
 * @param {{table: any}} props
 */
function Squeezed({table: {rows = [], verified, run_id: id, recommended_rank: best, source_rank: from}}) {
  if (!rows.length) return null;
  const solved = verified && new Map([verified.full, ...verified.ranks].map((row) => [row.rank, row.accuracy]));
  const accuracy = (rank) => (solved.has(rank) ? amount(solved.get(rank), true) : "–");
  const row = (each) =>
    html`<tr key=${each.rank}>
      <th scope="row">${each.rank}</th>
      <td class="number">${percent(each.mean_variance)}</td>
      <td class="number">${percent(each.min_variance)}</td>
      <td class="number">${percent(each.relative_error)}</td>
      ${solved && html`<td class="number">${accuracy(each.rank)}</td>`}
    </tr>`;
  const heads = ["energy, mean", "worst module", "weight error", ...(solved ? ["held-out accuracy"] : [])];
  return html`<section>
    <h2>A smaller rank <small>${id} ${best && `rank ${best} of ${from} is recommended`}</small></h2>
    <div class="scroll"><${NumberTable} first="rank" heads=${heads}>${rows.map(row)}<//></div>
  </section>`;
}
