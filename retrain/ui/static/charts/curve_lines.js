// The lines of a chart: of /api/columns a line for each run, of /api/curves a mean for each condition.

import {nameOf} from "../names.js";
import {columnsOf, isValue} from "./data.js";

// Bands of more runs would hide each other.
export const MOST_BANDS = 4;

function lineName({label, seed}) {
  return seed === null || seed === undefined ? label : `${label}, seed ${seed}`;
}

// Return least and greatest of a sample metric at the same rows as its mean.
function bandOf(run, x, metric) {
  const {spread} = metric;
  const ends = spread ? [run.columns[spread.min], run.columns[spread.max]] : [];
  const same = ends.length && ends.every((column) => column && !column.x && column.y.length === x.length);
  return same ? {low: ends[0].y, high: ends[1].y} : {};
}

export function runLines(runs, metric, keeps) {
  const shown = runs.filter((run) => run.columns[metric.key] && keeps(run, nameOf(run.place)));
  // Seed by seed, so that no condition lies wholly over another.
  shown.sort((a, b) => (a.seed || 0) - (b.seed || 0) || a.index - b.index);
  const banded = shown.length <= MOST_BANDS;
  return shown.map((run) => {
    const {y, raw, x = run.x} = run.columns[metric.key];
    const sparse = x !== run.x || y.filter(isValue).length < 0.5 * y.length;
    const band = banded && !raw ? bandOf(run, x, metric) : {};
    return {name: lineName(run), group: run.label, index: run.index, kind: "run", sparse, x, y, raw, ...band};
  });
}

function meanLine({label, index, mean, band, raw = null, n}, key) {
  return {name: label, index, kind: "mean", sparse: key.startsWith("eval/"), n, raw, ...columnsOf(mean, band)};
}

// Return the means of an answer of /api/curves; with `thin` also a line for each run.
export function conditionLines({key, smoothing, conditions}, thin) {
  const sparse = key.startsWith("eval/");
  const lineOf = ({label, index}, {seed, points}) => {
    const name = lineName({label, seed});
    return {name, index, kind: "thin", sparse, ...columnsOf(points)};
  };
  const means = conditions.filter((each) => each.mean.length);
  const isRaw = smoothing === "none";
  return [
    ...(thin || !means.length ? conditions.flatMap((each) => each.runs.map((run) => lineOf(each, run))) : []),
    ...means.map((each) => meanLine(isRaw ? {...each, raw: null} : each, key)),
  ];
}

export function differenceLines({key, differences}) {
  return differences.map((each) => meanLine({...each, raw: null}, key));
}

// Return how many seeds there are from each x on; null where no condition has two.
export function countsOf(conditions) {
  if (!conditions.some((each) => each.runs.length > 1)) return null;
  return conditions.map(({index, count}) => ({index, x: count.map(([x]) => x), n: count.map(([, n]) => n)}));
}
