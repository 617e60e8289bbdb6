// @ts-nocheck
// What the pages of texts and tokens share: the runs of a place, and a slider over steps.

import {get} from "../api.js";
import {choice, el, later} from "../dom.js";
import {runName} from "../names.js";
import {campaignOf} from "../places.js";
import {link} from "../router.js";

const known = new Map();

// The runs below a place: [{place, run_id, label, index, seed}]; read once for a while, as they hardly change.
export function runsOf(place) {
  const kept = known.get(place);
  if (kept && performance.now() - kept.at < 20000) return kept.runs;
  const runs = get("campaign", {at: place}).then((body) => body.runs);
  known.set(place, {at: performance.now(), runs});
  runs.catch(() => known.delete(place));
  return runs;
}

// The runs of the campaign that holds a place.
export async function family(place) {
  return runsOf(await campaignOf(place));
}

// Where a rollout of `run` stands beside the same prompt elsewhere: under another condition, else at another step; null: nowhere.
export function promptLink(kin, place, run, {split, iteration}, problem, sample) {
  if (new Set(kin.map((each) => each.label)).size > 1) return link("prompt", place, {a: run, b: partner(kin, run), split, step_a: iteration, step_b: iteration, problem, sample: sample || null});
  return split === "train" ? null : link("prompt", place, {a: run, b: run, split, step_b: iteration, problem, sample: sample || null});
}

// The run to set beside another: the same seed of another condition; else itself.
export function partner(runs, place) {
  const own = runs.find((run) => run.place === place);
  const others = runs.filter((run) => own && run.label !== own.label);
  return (others.find((run) => run.seed === own.seed) || others[0] || {place}).place;
}

export function runChoice(label, runs, value, choose) {
  const options = runs.map((run) => [run.place, runName(run)]);
  if (value && !runs.some((run) => run.place === value)) options.push([value, value]);
  return choice(label, options, value, choose);
}

// A slider over the steps that there are, with its step as text; `pick` is called once it rests for a moment.
export class Steps {
  constructor(label, pick) {
    this.steps = [];
    this.at = 0;
    this.out = el("output", {class: "stepno"});
    this.range = el("input", {type: "range", min: 0, max: 0, "aria-label": label, on: {input: () => { this.at = Number(this.range.value); this.write(); this.send(); }}});
    this.send = later(() => pick(this.steps[this.at]), 70);
    this.root = el("span", {class: "steps"}, this.range, this.out);
  }

  set(steps, step) {
    this.steps = steps;
    this.at = Math.max(0, steps.indexOf(step));
    this.range.max = Math.max(0, steps.length - 1);
    this.range.value = this.at;
    this.range.disabled = steps.length < 2;
    this.write();
  }

  write() {
    const words = `step ${this.steps[this.at] ?? "–"}`;
    this.out.textContent = words;
    this.range.setAttribute("aria-valuetext", `${words}, ${this.at + 1} of ${this.steps.length}`);
  }

  // The step that lies `by` further, or null at an end.
  beside(by) {
    return this.steps[this.at + by] ?? null;
  }
}

// A name in `most` characters: its end tells names apart more often than its beginning.
export function shortName(name, most) {
  const text = String(name), head = Math.floor(most / 3);
  return text.length <= most ? text : `${text.slice(0, head)}…${text.slice(head + 1 - most)}`;
}

// "train" and "eval/heldout" as words.
export function splitName(split) {
  return split.startsWith("eval/") ? `held out: ${split.slice(5)}` : split;
}
