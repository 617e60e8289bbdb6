// @ts-nocheck
// Columns of numbers of all runs at a place: asked for together, kept, and continued by increments when rows appear.

import {get, gone} from "./api.js";
import {spaced} from "./dom.js";
import {nameOf} from "./names.js";

const TOGETHER = 8;
const POINTS = [1000, 500];
const MANY_RUNS = 8;

// want(key, run) calls run(list of series | null, error); a series is {place, label, index, seed, rows, x, y, low, high}.
export class Columns {
  // Of many runs, each line has fewer points: a chart has no more room.
  constructor(at, x, smooth, runs = 1) {
    this.points = POINTS[runs > MANY_RUNS ? 1 : 0];
    Object.assign(this, {at, x, smooth, wanted: new Map(), series: new Map(), pending: new Set(), dirty: new Map(), flying: 0, stopped: false});
    this.abort = new AbortController();
    this.more = spaced(() => this.increment(), 700);
  }

  want(key, run) {
    if (!this.wanted.has(key)) this.wanted.set(key, new Set());
    this.wanted.get(key).add(run);
    if (this.series.has(key)) run([...this.series.get(key).values()]);
    if (!this.series.has(key) || this.stale && this.stale.has(key)) this.ask(key);
    return () => { const all = this.wanted.get(key); if (all) { all.delete(run); if (!all.size) this.wanted.delete(key); } };
  }

  ask(key) {
    this.pending.add(key);
    if (this.timer) return;
    this.timer = setTimeout(() => { this.timer = 0; this.flush(); }, 20);
  }

  flush() {
    while (this.pending.size && this.flying < 3) {
      const keys = [...this.pending].slice(0, TOGETHER);
      keys.forEach((key) => this.pending.delete(key));
      this.read(keys);
    }
  }

  async read(keys) {
    this.flying += 1;
    try {
      const body = await get("columns", {at: this.at, key: keys, x: this.x, smooth: this.smooth, points: this.points}, this.abort.signal);
      for (const key of keys) {
        const runs = new Map();
        body.runs.forEach((run, i) => {
          const column = run.columns[key];
          if (column) runs.set(run.place, {...identity(run, i), rows: run.rows, own: Boolean(column.x), x: column.x || run.x, y: column.y, low: column.low, high: column.high, error: run.error, note: run.note});
        });
        this.series.set(key, runs);
        if (this.stale) this.stale.delete(key);
        this.tell(key);
      }
    } catch (error) {
      if (!gone(error)) for (const key of keys) for (const run of this.wanted.get(key) || []) run(null, error);
    }
    this.flying -= 1;
    if (!this.stopped) this.flush();
  }

  tell(key) {
    const list = [...this.series.get(key).values()];
    for (const run of this.wanted.get(key) || []) run(list);
  }

  // An event of the server: this run has so many rows now.
  changed({place, what, rows}) {
    if (what && !what.includes("metrics") && !what.includes("evals")) return;
    this.dirty.set(place, rows);
    this.more();
  }

  async increment() {
    const dirty = [...this.dirty];
    this.dirty.clear();
    // What nobody looks at is read again when somebody does.
    this.stale = this.stale || new Set();
    for (const key of this.series.keys()) if (!this.wanted.has(key)) this.stale.add(key);
    const keys = [...this.wanted.keys()].filter((key) => this.series.has(key));
    if (!keys.length) return;
    for (const [place] of dirty) {
      const known = keys.map((key) => this.series.get(key).get(place)).filter(Boolean);
      if (!known.length) { keys.forEach((key) => this.ask(key)); return; }
      await this.append(place, keys, Math.min(...known.map((each) => each.rows)));
      if (this.stopped) return;
    }
  }

  async append(place, keys, since) {
    let body;
    try {
      body = await get("columns", {at: place, key: keys, x: this.x, smooth: this.smooth, since}, this.abort.signal);
    } catch (error) {
      if (!gone(error)) console.warn(error);
      return;
    }
    const run = body.runs.find((each) => each.place === place);
    if (!run) return;
    for (const key of keys) {
      const old = this.series.get(key).get(place), column = run.columns[key];
      if (!column) continue;
      // A file that was cut, or a line that has become long: the whole series anew, thinned out by the server.
      if (!old || run.rows < old.rows || old.x.length > 2 * this.points) { this.ask(key); continue; }
      if (column.x) { this.appendOwn(key, old, run.rows, column); continue; }
      const skip = old.rows - since;
      const low = old.low ? [...old.low, ...(column.low || column.y).slice(skip)] : null;
      const high = old.high ? [...old.high, ...(column.high || column.y).slice(skip)] : null;
      this.series.get(key).set(place, {...old, rows: run.rows, x: [...old.x, ...run.x.slice(skip)], y: [...old.y, ...column.y.slice(skip)], low, high});
      this.tell(key);
    }
  }

  // Evaluations, and metrics that not every row has, have an x of their own: what lies behind the last point is new.
  appendOwn(key, old, rows, column) {
    const end = old.x.length ? old.x[old.x.length - 1] : -Infinity, fresh = column.x.map((x, i) => i).filter((i) => column.x[i] > end);
    const more = (before, values) => [...before, ...fresh.map((i) => values[i])];
    const low = old.low && more(old.low, column.low || column.y), high = old.high && more(old.high, column.high || column.y);
    this.series.get(key).set(old.place, {...old, rows, x: more(old.x, column.x), y: more(old.y, column.y), low, high});
    if (fresh.length) this.tell(key);
  }

  stop() {
    this.stopped = true;
    this.abort.abort();
    this.more.stop();
    clearTimeout(this.timer);
  }
}

// Who a run is: as the server says, else from its name `<label>_s<seed>`.
function identity(run, i) {
  const id = nameOf(run.place), [, label, seed] = /^(.*)_s(\d+)$/.exec(id) || [null, id, null];
  return {place: run.place, id, label: run.label || label, index: run.index === undefined || run.index === null ? i : run.index,
    seed: run.seed === undefined ? seed : run.seed};
}
