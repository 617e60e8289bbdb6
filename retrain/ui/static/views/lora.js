// @ts-nocheck
// What the adapters learnt, by singular values: energy by rank, over checkpoints, per module; overlap between seeds.

import {get, gone, newest} from "../api.js";
import {Card} from "../charts/card.js";
import {choice, el, failed, keepingFocus, loading, nothing, put, spaced} from "../dom.js";
import {amount, number, percent, plural} from "../format.js";
import {runName} from "../names.js";
import {link} from "../router.js";

const KEPT = 0.95;

function byRank(runs) {
  return runs.map((run) => ({name: runName(run), index: run.index || 0, kind: runs.length > 4 ? "run" : "mean", x: run.energy.map((_, i) => i + 1), y: run.energy}));
}

function overSteps(run) {
  const checkpoints = (run.checkpoints || []).filter((each) => each.step !== null);
  const most = Math.max(0, ...checkpoints.map((each) => each.energy.length)), ranks = [1, 2, 4, 8, 16, 32, 64].filter((rank) => rank < most);
  return ranks.map((rank, i) => ({name: `rank ${rank}`, index: i, kind: "mean", x: checkpoints.map((each) => each.step), y: checkpoints.map((each) => each.energy[rank - 1] ?? null)}));
}

function ranksFor(energy) {
  const at = energy.findIndex((share) => share >= KEPT);
  return at < 0 ? null : at + 1;
}

// A cell whose tint says how much; the number says it too.
function tinted(value, most, text) {
  return el("td", {class: "number tint", style: {"--much": `${Math.round(45 * Math.max(0, Math.min(1, (value || 0) / (most || 1))))}%`}}, text);
}

function heads(first, others) {
  return el("thead", null, el("tr", null, first ? el("th", {scope: "col"}, first) : el("td"), others.map((words) => el("th", {scope: "col", class: "number"}, words))));
}

function modules(run) {
  if (!run.modules.length) return null;
  const rows = run.modules.map((each) => ({...each, ranks: ranksFor(each.energy)}));
  const norms = Math.max(...rows.map((row) => row.norm)), ranks = Math.max(...rows.map((row) => row.ranks || 0));
  return el("section", null, el("h2", null, "Modules", el("small", null, `${runName(run)}: size of the change, and how many ranks hold ${100 * KEPT} % of its energy`)),
    el("div", {class: "scroll tall", tabindex: "0", role: "region", "aria-label": "modules"}, el("table", {class: "tight"}, heads("module", ["norm", `ranks for ${100 * KEPT} %`, "first direction"]),
      el("tbody", null, rows.map((row) => el("tr", null, el("th", {scope: "row"}, el("code", null, row.name)), tinted(row.norm, norms, number(row.norm)), tinted(row.ranks, ranks, String(row.ranks ?? "–")),
        el("td", {class: "number"}, percent(row.energy[0]))))))));
}

function overlap(pairs, runs, directions) {
  if (!pairs || !pairs.length) return null;
  const shown = runs.filter((run) => pairs.some((pair) => pair.a === run.place || pair.b === run.place));
  const find = (a, b) => pairs.find((pair) => (pair.a === a && pair.b === b) || (pair.a === b && pair.b === a));
  const chance = pairs.reduce((sum, pair) => sum + pair.chance, 0) / pairs.length;
  return el("section", null, el("h2", null, "Overlap of directions between runs", el("small", null, `mean over modules of the first ${plural(directions, "direction")}; 1: the same; by chance ${number(chance, 2)}`)),
    el("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": "overlap"}, el("table", {class: "tight matrix"}, heads("", shown.map(runName)),
      el("tbody", null, shown.map((a) => el("tr", null, el("th", {scope: "row"}, runName(a)), shown.map((b) => {
        const pair = find(a.place, b.place);
        return pair ? tinted(pair.overlap, 1, pair.overlap.toFixed(3)) : el("td", {class: "number muted"}, a === b ? "1" : "–");
      })))))));
}

// What `retrain squeeze` found: what a smaller rank keeps, and what it still solves.
function squeezed(table) {
  const rows = table.rows || [];
  if (!rows.length) return null;
  const solved = table.verified ? new Map([table.verified.full, ...table.verified.ranks].map((row) => [row.rank, row])) : null;
  return el("section", null, el("h2", null, "A smaller rank", el("small", null, `${table.run_id || ""} ${table.recommended_rank ? `rank ${table.recommended_rank} of ${table.source_rank} is recommended` : ""}`)),
    el("div", {class: "scroll"}, el("table", {class: "tight"}, heads("rank", ["energy, mean", "worst module", "weight error", ...(solved ? ["held-out accuracy"] : [])]),
      el("tbody", null, rows.map((row) => el("tr", null, el("th", {scope: "row"}, String(row.rank)), el("td", {class: "number"}, percent(row.mean_variance)), el("td", {class: "number"}, percent(row.min_variance)),
        el("td", {class: "number"}, percent(row.relative_error)), solved ? el("td", {class: "number"}, solved.has(row.rank) ? amount(solved.get(row.rank).accuracy, true) : "–") : null))))));
}

export function lora(root, state, frame) {
  const {patch} = frame, next = newest();
  let query = state.query, body = null, seen = "", took = 0;
  const tools = el("div", {class: "tools"}), place = el("div", null, loading("Reading the adapters …"));
  put(root, el("div", {class: "title"}, el("h1", null, "LoRA"), el("p", {class: "muted"}, "what the adapters learnt, by singular values")), tools, place);
  const rank = new Card({title: "Energy by rank", words: "share of the change's energy in its first directions, mean of the modules", level: "h2", height: 280, x: "rank", group: "rank", share: true, unit: "%"});
  const steps = new Card({title: "Over checkpoints", words: "energy in the first directions, by how many of them", level: "h2", height: 280, x: "step", group: "checkpoints", share: true, unit: "%", emptyWords: "No checkpoints to compare"});

  function draw(whole) {
    const runs = body.runs.filter((run) => run.modules.length);
    if (!runs.length) { put(place, nothing("No adapter to look at", "These runs keep no LoRA adapter yet: it is written with checkpoints and at the end.")); return; }
    const run = (whole && whole.runs[0]) || runs.find((each) => each.place === query.run) || runs[0];
    keepingFocus(tools, () => put(tools, runs.length > 1 ? choice("run", runs.map((each) => [each.place, runName(each)]), run.place, (value) => patch({run: value})) : null,
      el("a", {href: link("lora", run.place)}, `${runName(run)}, step ${run.step ?? "?"}`), body.left_out ? el("span", {class: "muted"}, `${plural(body.left_out, "further run")} not read`) : null));
    if (!place.contains(rank.root)) put(place, el("div", {class: "two"}, rank.root, steps.root), el("div"), el("div"), el("div"));
    rank.set(byRank(runs), {});
    steps.set(overSteps(run), {});
    put(place.children[1], overlap(body.overlap, runs, body.directions));
    put(place.children[2], (body.squeeze || []).map(squeezed));
    put(place.children[3], modules(run));
  }

  // `anew`: adapters may have been written since; what is shown stays until all of it is read.
  async function read(anew = false) {
    const signal = next(), start = performance.now();
    try {
      const found = body && !anew ? body : await get("lora", {at: state.place}, signal);
      if (!anew) { body = found; draw(null); }
      // Checkpoints are read of one run at a time.
      const runs = found.runs.filter((run) => run.modules.length), run = runs.find((each) => each.place === query.run) || runs[0];
      const whole = run && found.runs.length > 1 ? await get("lora", {at: run.place}, signal) : null;
      body = found;
      const now = JSON.stringify([found, whole]);
      if (now !== seen) draw(whole);
      seen = now;
      took = performance.now() - start;
    } catch (error) {
      if (gone(error) || (anew && body)) return;
      seen = "";
      put(place, failed(error, () => read()));
    }
  }
  read();
  // No event names a checkpoint: a campaign whose runs go on is looked at again, the less often the longer it takes.
  const again = spaced(() => read(true), () => Math.max(10000, 20 * took));
  return {
    title: "LoRA",
    update(to) { query = to.query; read(); },
    changed({what}) { if ((what || []).some((each) => each === "metrics" || each === "evals" || each === "state")) again(); },
    stop() { next.stop(); again.stop(); rank.stop(); steps.stop(); },
    keys: {},
  };
}
