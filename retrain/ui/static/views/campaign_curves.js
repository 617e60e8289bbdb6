// The curve of one metric by condition, and the paired difference to the baseline, as the server computed them.

import {get} from "../api.js";
import {Card} from "../charts/card.js";
import {columnsOf} from "../charts/data.js";
import {X_CHOICES} from "../charts/plot.js";
import {why} from "../why.js";
import {button, choice, el, spaced, tick} from "../dom.js";
import {link, patch} from "../router.js";

const SMOOTH = [["", "smoothed as in the report"], [1, "no smoothing"], [5, "over 5 steps"], [10, "over 10 steps"], [20, "over 20 steps"], [50, "over 50 steps"], [100, "over 100 steps"]];

function isShare(about) {
  return Boolean(about && about.unit === "share");
}

export function linesOf(body, thin) {
  const sparse = /^eval\//.test(body.key);
  const lines = [];
  for (const each of body.conditions) {
    if (thin) for (const run of each.runs) lines.push({name: `${each.label}, seed ${run.seed}`, index: each.index, kind: "thin", sparse, ...columnsOf(run.points)});
  }
  for (const each of body.conditions) if (each.mean.length) lines.push({name: each.label, index: each.index, kind: "mean", sparse, ...columnsOf(each.mean, each.band)});
  return lines;
}

export function countsOf(body) {
  return body.conditions.map((each) => ({index: each.index, x: each.count.map((one) => one[0]), n: each.count.map((one) => one[1])}));
}

export function curves(state, campaign) {
  let query = state.query, metrics = null, stopped = false, asked = null, request = 0, took = 0;
  const tools = el("div", {class: "tools"});
  const zoom = (range) => patch({zoom: range ? range.map((value) => Number(value.toPrecision(6))).join(",") : null}, {replace: true});
  const options = () => {
    const x = query.x || "step", range = (query.zoom || "").split(",").map(Number);
    return {x, group: "campaign", logX: query.logx === "1", zoom: query.zoom && range.length === 2 && range.every(Number.isFinite) ? range : null};
  };
  const level = new Card({title: "", height: 290, onZoom: zoom, ...options(),
    tools: [button("Why?", () => why(key(), campaign.runs.map((run) => run.place)), {class: "bare", title: "what this number means"})]});
  const apart = new Card({title: "", height: 290, onZoom: zoom, ...options(), zero: true, emptyWords: "No pair of runs has come so far yet"});
  const root = el("section", null, el("h2", null, "Curves"), tools, el("div", {class: "two"}, level.root, apart.root));

  // Before anything can be compared there is no primary metric yet: the first that is worth watching.
  function usual() {
    return campaign.metric || (metrics && (metrics.watch[0] || (metrics.metrics[0] || {}).key)) || null;
  }

  function key() {
    return query.key || usual();
  }

  function keys() {
    return [...new Set([campaign.metric, ...(campaign.sets || []).map((name) => `eval/${name}/correct_rate`), ...(metrics ? metrics.watch : [])])].filter(Boolean);
  }

  function drawTools() {
    const focus = document.activeElement && tools.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    const select = el("select", {"aria-label": "metric", class: "metric", on: {change: () => patch({key: select.value === usual() ? null : select.value, zoom: query.zoom || null})}});
    const group = (label, list) => el("optgroup", {label}, list.map((each) => el("option", {value: each, selected: each === key()}, each)));
    select.append(group("watched", keys()));
    if (metrics) {
      const rest = metrics.metrics.map((each) => each.key).filter((each) => !keys().includes(each));
      if (rest.length) select.append(group("all", rest));
    }
    if (key() && ![...select.options].some((each) => each.value === key())) select.append(group("chosen", [key()]));
    tools.replaceChildren(select,
      choice("x axis", X_CHOICES, query.x || "step", (value) => patch({x: value === "step" ? null : value, zoom: null})),
      choice("smoothing", SMOOTH, query.smooth || "", (value) => patch({smooth: value})),
      tick("log x", query.logx === "1", (on) => patch({logx: on ? 1 : null})),
      tick("log y", query.logy === "1", (on) => patch({logy: on ? 1 : null})),
      tick("every seed", query.thin !== "0", (on) => patch({thin: on ? null : 0})),
      query.zoom ? button("whole range", () => zoom(null)) : "",
      el("a", {href: link("metrics", state.place)}, "all metrics"));
    if (focus) { const again = [...tools.children].find((each) => each.getAttribute && each.getAttribute("aria-label") === focus); if (again) again.focus(); }
  }

  function draw(body) {
    const share = body.share ?? isShare(body.about), common = {...options(), share};
    const means = body.conditions.filter((each) => each.mean.length).length, seeds = Math.max(0, ...body.conditions.map((each) => each.runs.length));
    level.title(body.key);
    const early = body.conditions.some((each) => each.of === "all"), over = body.smooth > 1 ? `; moving average over ${body.smooth} steps` : "";
    level.words(` mean of ${early ? "all runs, as far as all came" : "the finished runs"}${over}${body.conditions.some((each) => each.band.length) ? "; band: 95 % interval" : ""}${seeds > 1 ? "; strip: how many seeds" : ""}`);
    level.set(linesOf(body, query.thin !== "0" || !means), {...common, unit: share ? "%" : "", logY: query.logy === "1", counts: seeds > 1 ? countsOf(body) : null,
      range: body.about && body.about.range, healthy: body.about && body.about.healthy});
    apart.title(`${body.key}: difference to ${(body.conditions[0] || {}).label || "the baseline"}`);
    apart.words(" mean of the pairs; band: 95 % interval at each step alone, no verdict");
    apart.set((body.differences || []).map((each) => ({name: each.label, index: each.index, kind: "mean", sparse: /^eval\//.test(body.key), ...columnsOf(each.mean, each.band)})),
      {...common, unit: share ? "points" : "", share: share ? "points" : false});
  }

  async function read() {
    if (!key()) return;
    const own = request += 1, start = performance.now();
    const wanted = {at: state.place, key: key(), x: query.x || "step", smooth: query.smooth};
    try {
      const body = await get("curves", wanted);
      if (stopped || own !== request) return;
      asked = body;
      took = performance.now() - start;
      draw(body);
    } catch (error) {
      if (stopped || own !== request) return;
      level.fail(error, read);
      apart.set([], {});
    }
  }

  drawTools();
  level.title(key() || "");
  apart.title("Difference to the baseline");
  read();
  get("metrics", {at: state.place}).then((body) => {
    metrics = body;
    if (stopped) return;
    drawTools();
    if (!asked && !campaign.metric) read();
    if (!key()) level.set([], {emptyWords: "Nothing was recorded yet"});
  }).catch(() => { /* The curve of the primary metric needs no list. */ });
  const again = spaced(read, () => Math.max(800, 5 * took));
  return {
    root,
    update(next) {
      const data = ["key", "x", "smooth"].some((each) => next.query[each] !== query[each]);
      query = next.query;
      drawTools();
      if (data || !asked) read();
      else draw(asked);
    },
    changed: again,
    move(by) {
      const all = keys(), at = all.indexOf(key());
      const next = all[(at + by + all.length) % all.length];
      patch({key: next === usual() ? null : next});
    },
    stop() { stopped = true; again.stop(); level.stop(); apart.stop(); },
  };
}
