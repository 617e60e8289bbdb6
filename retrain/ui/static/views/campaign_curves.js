// @ts-nocheck
// The curve of one metric by condition, and the paired difference to the baseline, as the server computed them.

import {get, gone, newest} from "../api.js";
import {Card} from "../charts/card.js";
import {columnsOf} from "../charts/data.js";
import {X_CHOICES} from "../charts/plot.js";
import {why} from "../why.js";
import {button, choice, el, keepingFocus, spaced, tick} from "../dom.js";
import {link} from "../router.js";
import {CurveAnswers} from "./curve_answers.js";
import {SMOOTH, smoothing, smoothOf, zoomOf, zoomTo} from "./curve_knobs.js";

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

// campaign: the answer of /api/campaign, newer ones come by about(); patch changes the address.
export function curves(state, campaign, patch) {
  let query = state.query, metrics = null, listed = "";
  const next = newest(), answers = new CurveAnswers(() => draw(answers.body()), (error, retry) => { level.fail(error, retry); apart.set([], {}); });
  const tools = el("div", {class: "tools"});
  const zoom = (range) => patch(zoomTo(range), {replace: true});
  const options = () => ({x: query.x || "step", group: "campaign", logX: query.logx === "1", zoom: zoomOf(query)});
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
    const select = el("select", {"aria-label": "metric", class: "metric", on: {change: () => patch({key: select.value === usual() ? null : select.value, zoom: query.zoom || null})}});
    const group = (label, list) => el("optgroup", {label}, list.map((each) => el("option", {value: each, selected: each === key()}, each)));
    select.append(group("watched", keys()));
    if (metrics) {
      const rest = metrics.metrics.map((each) => each.key).filter((each) => !keys().includes(each));
      if (rest.length) select.append(group("all", rest));
    }
    if (key() && ![...select.options].some((each) => each.value === key())) select.append(group("chosen", [key()]));
    keepingFocus(tools, () => tools.replaceChildren(select,
      choice("x axis", X_CHOICES, query.x || "step", (value) => patch({x: value === "step" ? null : value, zoom: null})),
      smoothing([["", "smoothed as in the report"], ...SMOOTH], query.smooth || "", (value) => patch({smooth: value})),
      tick("log x", query.logx === "1", (on) => patch({logx: on ? 1 : null})),
      tick("log y", query.logy === "1", (on) => patch({logy: on ? 1 : null})),
      tick("every seed", query.thin !== "0", (on) => patch({thin: on ? null : 0})),
      query.zoom ? button("whole range", () => zoom(null)) : "",
      el("a", {href: link("metrics", state.place)}, "all metrics")));
  }

  function draw(body) {
    const share = body.share ?? isShare(body.about), common = {...options(), share};
    const means = body.conditions.filter((each) => each.mean.length).length, seeds = Math.max(0, ...body.conditions.map((each) => each.runs.length));
    level.title(body.key);
    const early = body.conditions.some((each) => each.of === "all"), over = body.smooth > 1 ? `; moving average over ${body.smooth} steps` : "";
    level.words(` mean of ${early ? "all runs, as far as all came" : "the finished runs"}${over}${body.conditions.some((each) => each.band.length) ? "; band: 95 % interval" : ""}${seeds > 1 ? "; strip: how many seeds" : ""}${body.note ? `; ${body.note}` : ""}`);
    level.set(linesOf(body, query.thin !== "0" || !means), {...common, unit: share ? "%" : "", logY: query.logy === "1", counts: seeds > 1 ? countsOf(body) : null,
      range: body.about && body.about.range, healthy: body.about && body.about.healthy});
    apart.title(`${body.key}: difference to ${(body.conditions[0] || {}).label || "the baseline"}`);
    apart.words(" mean of the pairs; band: 95 % interval at each step alone, no verdict");
    apart.set((body.differences || []).map((each) => ({name: each.label, index: each.index, kind: "mean", sparse: /^eval\//.test(body.key), ...columnsOf(each.mean, each.band)})),
      {...common, unit: share ? "points" : "", share: share ? "points" : false});
  }

  function read() {
    if (key()) answers.ask({at: state.place, key: key(), x: query.x || "step", smooth: smoothOf(query)}, zoomOf(query));
  }

  // The keys that there are: more of them come with the first rows and evaluations.
  async function list() {
    try {
      const body = await get("metrics", {at: state.place}, next()), now = JSON.stringify(body);
      if (now === listed) return;
      listed = now;
      metrics = body;
      drawTools();
      if (key()) read(); else level.set([], {emptyWords: "Nothing was recorded yet"});
    } catch (error) { if (!gone(error)) console.warn(error); }
  }

  drawTools();
  level.title(key() || "");
  apart.title("Difference to the baseline");
  read();
  list();
  const again = spaced(() => { if (key()) answers.again(); }, () => Math.max(800, 5 * answers.took)), listAgain = spaced(list, 4000);
  return {
    root,
    about(body) {
      const before = JSON.stringify([usual(), keys()]);
      campaign = body;
      if (JSON.stringify([usual(), keys()]) !== before) drawTools();
      read();
    },
    update(to) {
      query = to.query;
      drawTools();
      read();
    },
    changed() { again(); listAgain(); },
    whole() { if (query.zoom) zoom(null); },
    move(by) {
      const all = keys(), at = all.indexOf(key());
      const to = all[(at + by + all.length) % all.length];
      patch({key: to === usual() ? null : to});
    },
    stop() { next.stop(); answers.rest(); again.stop(); listAgain.stop(); level.stop(); apart.stop(); },
  };
}
