// A copy of the page without a server (retrain ui --bundle): its answers are files beside it, read when they are asked
// for.

import {holder} from "./names.js";

/** @typedef {Record<string, any>} Params */

const KEPT = globalThis.RETRAIN_COPY || null;
const loaded = new Map();
const known = new Map();
// What changes how much of an answer there is, or when it comes: a copy has one of each.
const FREE = new Set(["points", "wait_ms", "since", "count", "from", "to"]);
// What is the same as leaving it out.
const PLAIN = new Set(["first=0", "down=0", "sort=index", "sample=0"]);

if (KEPT)
  globalThis.retrainAnswers = (answers) => {
    for (const [key, value] of Object.entries(answers)) known.set(key, value);
  };

export function isCopy() {
  return KEPT !== null;
}

/** On which day the copy was made. */
export const madeAt = KEPT && KEPT.made;

function nameOf(name, params) {
  const pairs = Object.entries(params).filter(
    ([key, value]) => !FREE.has(key) && value !== null && value !== undefined && value !== "",
  );
  const texts = pairs.map(([key, value]) => `${key}=${value}`).filter((each) => !PLAIN.has(each));
  return `${name}?${texts.sort().join("&")}`;
}

function load(file) {
  if (!loaded.has(file)) {
    loaded.set(
      file,
      new Promise((done, failed) => {
        const script = document.createElement("script");
        script.src = file;
        script.addEventListener("load", done);
        script.addEventListener("error", () => failed(new Error(`${file} is missing beside this page.`)));
        document.head.append(script);
      }),
    );
  }
  return loaded.get(file);
}

/** @returns {Promise<any>} */
async function one(name, params) {
  const key = nameOf(name, params);
  if (!(key in KEPT.files)) return null;
  await load(`data/${KEPT.files[key]}.js`);
  return known.has(key) ? known.get(key) : null;
}

// Columns are kept key by key for a whole campaign; those of several keys, or of one run, are put together here.
async function columns(params) {
  const places = [params.at].flat();
  const keys = [params.key].flat();
  const runs = new Map();
  for (const at of places) {
    for (const key of keys) {
      const body = await one("columns", {at: holder(KEPT.homes, at) || at, key, x: params.x || "step"});
      for (const run of body ? body.runs : []) {
        if (run.place !== at && !run.place.startsWith(`${at}/`)) continue;
        if (!runs.has(run.place)) runs.set(run.place, {...run, columns: {}});
        const column = run.columns[key];
        if (column) runs.get(run.place).columns[key] = {...column, x: column.x || run.x};
      }
    }
  }
  return runs.size ? {runs: [...runs.values()]} : null;
}

// Curves are kept for a whole campaign; of a run its own lines are taken from them.
async function curves({at, key, x}) {
  const [place] = [at].flat();
  const home = holder(KEPT.homes, place);
  const body = await one("curves", {at: home, key, x: x || "step"});
  if (!body || home === place) return body;
  const own = ({runs, ...each}) => ({...each, runs: runs.filter((run) => run.place === place), mean: [], band: []});
  const conditions = body.conditions.map(own).filter(({runs}) => runs.length);
  return {...body, conditions, differences: []};
}

// The same prompt is kept for the newest steps alone.
async function samePrompt({step_a, step_b, ...about}) {
  const kept = await one("prompt", about);
  const sides = Object.entries({a: step_a, b: step_b});
  const same = kept && sides.every(([side, step]) => [undefined, null, kept[side].about.iteration].includes(step));
  return same ? kept : null;
}

/** The answer that was kept, the nearest there is, or null. @returns {Promise<any>} */
export async function answer(name, params) {
  if (name === "columns") return columns(params);
  const exact = await one(name, params);
  if (exact) return exact;
  if (name === "curves") return curves(params);
  if (name === "prompt") return samePrompt(params);
  if (name === "metrics" || name === "runs") return one(name, {...params, at: holder(KEPT.homes, params.at || "")});
  return null;
}
