// @ts-nocheck
// Metrics: watched, all or one's own charts over one x axis, with one cursor; each row appears as it is written.

import {get, gone, newest} from "../api.js";
import {X_CHOICES} from "../charts/plot.js";
import {name as conditionName} from "../colours.js";
import {Columns} from "../columns.js";
import {button, choice, el, failed, keepingFocus, later, loading, notRecorded, nothing, put, say, spaced, tick} from "../dom.js";
import {plural} from "../format.js";
import {step} from "../keys.js";
import {nameOf} from "../names.js";
import {ownerOf} from "../places.js";
import {SMOOTH, smoothing, smoothOf, zoomOf, zoomTo} from "./curve_knobs.js";
import {distribution} from "./distribution.js";
import {MetricCard} from "./metrics_card.js";
import {fileButtons, plainMetric, readMine, searchOf, sections, writeMine} from "./metrics_keys.js";

const TABS = {watch: "Watch", all: "All", mine: "Mine"};

export function metrics(root, state, frame) {
  const {patch} = frame, next = newest();
  let query = state.query, body = null, cards = [], runs = [], layout = "", panel = null, known = "", took = 0, left = false;
  const tabs = el("div", {class: "segments", role: "group", "aria-label": "which charts"});
  const search = el("input", {type: "search", placeholder: "search: a regular expression", "aria-label": "search metrics by regular expression", value: query.q || "",
    on: {input: later(() => patch({q: search.value || null, ...(search.value && tab() === "watch" ? {tab: "all"} : {})}, {replace: true}), 150)}});
  const tools = el("div", {class: "tools sticky"}), legend = el("div", {class: "legend", role: "group", "aria-label": "conditions"});
  const place = el("div", {class: "histplace"}), grid = el("div", null, loading("Reading the metrics …"));
  const title = el("div", {class: "title"}, el("h1", null, nameOf(state.place)), el("p", {class: "muted"}));
  const knobs = el("div", {class: "knobs"});
  tools.append(tabs, search, knobs);
  put(root, title, tools, legend, place, grid);
  const page = {place: state.place, columns: new Columns(state.place, query.x || "step", smoothOf(query) || 1), hidden: new Set(), settings, pin, patch, runs: () => runs.length ? runs.map((run) => run.place) : [state.place],
    onZoom: (range) => patch(zoomTo(range), {replace: true})};
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const card = cards.find((each) => each.root === entry.target);
      if (card) { if (entry.isIntersecting) card.enter(); else card.leave(); }
    }
  }, {rootMargin: "250px"});

  function tab() {
    return query.tab in TABS ? query.tab : query.keys ? "mine" : "watch";
  }

  function settings() {
    const x = query.x || "step";
    return {x, smooth: smoothOf(query) || 1, lines: query.lines === "conditions" ? "conditions" : "runs", thin: query.thin === "1",
      plot: {x, logX: query.logx === "1", logY: query.logy === "1", clip: query.clip === "1", full: query.full === "1", zoom: zoomOf(query)}};
  }

  function pin(key) {
    patch({keys: writeMine([...readMine(query.keys), {key, only: ""}]), tab: tab() === "mine" ? null : tab()});
    say(`${key} is in Mine`);
  }

  function drawTools() {
    const mine = readMine(query.keys);
    keepingFocus(tabs, () => put(tabs, Object.entries(TABS).map(([value, text]) => button(value === "mine" && mine.length ? `${text} ${mine.length}` : text, () => patch({tab: value, open: null}), {"aria-pressed": String(tab() === value)}))));
    const flag = (key, text, hint) => tick(text, query[key] === "1", (on) => patch({[key]: on ? 1 : null}), {title: hint});
    keepingFocus(knobs, () => put(knobs,
      choice("x axis", X_CHOICES, query.x || "step", (value) => patch({x: value === "step" ? null : value, zoom: null})),
      smoothing(SMOOTH, query.smooth || 1, (value) => patch({smooth: value === "1" ? null : value})),
      runs.length > 1 ? choice("lines", [["runs", "a line for each run"], ["conditions", "mean of each condition"]], settings().lines, (value) => patch({lines: value === "runs" ? null : value})) : null,
      settings().lines === "conditions" ? flag("thin", "every seed") : null,
      body && body.tags && body.tags.length ? choice("tag or environment", [["", "all tags"], ...body.tags.map((each) => [each, `tag ${each}`])], query.tag || "", (value) => patch({tag: value, ...(value && tab() === "watch" ? {tab: "all"} : {})})) : null,
      flag("logx", "log x"), flag("logy", "log y"), flag("clip", "without outliers", "the y axis shows the middle 98 % of the values"),
      flag("full", "declared range", "the y axis shows the whole range that was declared for the metric"),
      query.zoom ? button("whole range", () => page.onZoom(null)) : null));
  }

  function drawLegend() {
    page.hidden = new Set((query.hide || "").split("|").filter(Boolean));
    const labels = new Map(runs.map((run) => [run.label, run.index]));
    keepingFocus(legend, () => put(legend, labels.size < 2 ? null : [...labels].map(([label, index]) => button(conditionName(label, index), () => {
      const hidden = new Set(page.hidden);
      if (!hidden.delete(label)) hidden.add(label);
      patch({hide: [...hidden].join("|") || null});
    }, {"aria-pressed": String(!page.hidden.has(label)), class: page.hidden.has(label) ? "off" : "", title: "show or hide"}))));
  }

  function find(key) {
    return body.metrics.find((each) => each.key === key) || body.metrics.find((each) => (each.aliases || []).includes(key)) || plainMetric(key);
  }

  function add(metric, own) {
    const card = new MetricCard(page, metric, own);
    cards.push(card);
    return card.root;
  }

  function mineTools(items, i) {
    const swap = (by) => { const next = [...items]; [next[i], next[i + by]] = [next[i + by], next[i]]; patch({keys: writeMine(next)}); };
    const key = items[i].key;
    return [button("◂", () => swap(-1), {class: "bare", "aria-label": `move ${key} forward`, title: "move forward", disabled: i === 0}),
      button("▸", () => swap(1), {class: "bare", "aria-label": `move ${key} back`, title: "move back", disabled: i === items.length - 1}),
      button("+", () => patch({keys: writeMine([...items.slice(0, i + 1), items[i], ...items.slice(i + 1)])}), {class: "bare", "aria-label": `${key} once more`, title: "once more, for another filter"}),
      button("✕", () => patch({keys: writeMine(items.filter((_, at) => at !== i)), tab: "mine"}), {class: "bare", "aria-label": `take ${key} out of Mine`, title: "take out"})];
  }

  // The charts, made anew only when another set of them is asked for.
  function drawGrid() {
    const keys = tab() === "mine" ? readMine(query.keys).map((item) => item.key) : null, every = body.metrics.map((metric) => metric.key);
    const there = tab() === "watch" ? body.watch : keys ? keys.filter((each) => every.includes(each)) : every;
    const now = JSON.stringify([tab(), query.q, query.tag, query.keys && tab() === "mine" ? query.keys : null, query.open, there]);
    if (now === layout) { cards.forEach((card) => card.again()); return; }
    layout = now;
    // New keys come while one reads: the chart that has the focus keeps it.
    const focused = cards.findIndex((card) => card.root.contains(document.activeElement)), key = focused < 0 ? null : cards[focused].metric.key;
    seen.disconnect();
    cards.forEach((card) => card.stop());
    cards = [];
    const {test, wrong} = searchOf(query.q, query.tag), big = query.open ? el("div", {class: "big"}, add(find(query.open), {big: true, level: "h2"})) : null;
    search.classList.toggle("wrong", Boolean(wrong));
    search.setAttribute("aria-invalid", String(Boolean(wrong)));
    const warning = wrong ? el("p", {class: "warn"}, wrong) : null;
    const charts = (list) => el("div", {class: "charts"}, list);
    if (tab() === "watch") {
      const list = body.watch.map(find).filter(test);
      put(grid, warning, big, list.length ? charts(list.map((metric) => add(metric, {level: "h2"}))) : nothing("None of the watched metrics is here", "All has every key that these runs wrote."));
    } else if (tab() === "mine") {
      const items = readMine(query.keys);
      put(grid, fileButtons(query, patch), warning, big, items.length ? charts(items.map((item, i) => test(find(item.key)) ? add(find(item.key), {only: item.only, level: "h2", filterable: true, tools: mineTools(items, i),
        onFilter: (only) => patch({keys: writeMine(items.map((each, at) => at === i ? {...each, only} : each))})}) : null))
        : nothing("Nothing chosen yet", "☆ on a chart puts it here. The address holds your choice: keep it as a bookmark, or send it."));
    } else {
      const kept = body.metrics.filter(test), groups = sections(kept);
      put(grid, warning, big, kept.length ? groups.map(([section, each]) => el("section", null, el("h2", {class: "section", tabindex: "-1"}, section, el("small", null, plural(each.reduce((sum, one) => sum + one[1].length, 0), "metric"))),
        each.map(([group, list]) => [group && each.length > 1 ? el("h3", {class: "group"}, group) : null, charts(list.map((metric) => add(metric)))])))
        : nothing("No metric matches", "The search looks at keys, sections and the names that other tools use."));
    }
    cards.forEach((card) => seen.observe(card.root));
    const again = key === null ? null : cards.find((card) => card.metric.key === key);
    if (again) again.root.focus({preventScroll: true});
  }

  function drawHistogram() {
    if (query.hist && !panel) { panel = distribution(state.place, () => query, patch); put(place, panel.root); }
    else if (!query.hist && panel) { panel.stop(); panel = null; put(place); }
    else if (panel) panel.update();
  }

  function draw() {
    if (!body) return;
    drawTools();
    drawLegend();
    drawHistogram();
    drawGrid();
  }

  function runsOf(columns) {
    return columns.runs.map((run, i) => ({label: run.label || nameOf(run.place).replace(/_s\d+$/, ""), index: run.index ?? i, place: run.place}));
  }

  // What there is to show: keys and runs, which become more while runs train.
  async function readKeys() {
    const signal = next(), start = performance.now();
    try {
      const first = get("columns", {at: state.place, key: "step", x: "step", points: 2}, signal).catch((error) => { if (gone(error)) throw error; return {runs: []}; });
      const [found, columns] = await Promise.all([get("metrics", {at: state.place}, signal), first]);
      const now = JSON.stringify([found, runsOf(columns)]);
      took = performance.now() - start;
      if (now === known) return;
      known = now;
      body = found;
      if (runs.length !== columns.runs.length) renew(columns.runs.length);
      runs = runsOf(columns);
      put(title.querySelector("p"), `${plural(body.metrics.length, "metric")} of ${plural(runs.length, "run")}`);
      draw();
    } catch (error) {
      if (gone(error)) return;
      if (body) console.warn(error); else put(grid, failed(error, readKeys));
    }
  }

  // Columns over another axis, smoothed otherwise, or of another number of runs.
  function renew(count) {
    page.columns.stop();
    page.columns = new Columns(state.place, query.x || "step", smoothOf(query) || 1, count);
    cards.forEach((card) => card.renew());
  }

  async function sayMissing() {
    const summary = await ownerOf(state.place);
    if (!left && summary && summary.kind === "run") title.append(notRecorded(summary.missing) || "");
  }
  drawTools();
  readKeys();
  sayMissing();
  const keysAgain = spaced(readKeys, () => Math.max(3000, 10 * took));
  return {
    title: "Metrics",
    update(to) {
      const other = to.query.x !== query.x || smoothOf(to.query) !== smoothOf(query);
      query = to.query;
      if (document.activeElement !== search) search.value = query.q || "";
      if (other) renew(runs.length);
      draw();
    },
    changed(event) { page.columns.changed(event); cards.forEach((card) => card.changed()); keysAgain(); },
    stop() { left = true; next.stop(); seen.disconnect(); page.columns.stop(); keysAgain.stop(); if (panel) panel.stop(); cards.forEach((card) => card.stop()); },
    keys: {
      Escape: ["all of the x axis again", () => { if (query.zoom) page.onZoom(null); }],
      j: ["next chart", () => step(".chartcard", 1)], k: ["previous chart", () => step(".chartcard", -1)],
      g: ["next section", () => { const heads = [...grid.querySelectorAll("h2.section")], next = heads.find((each) => each.getBoundingClientRect().top > 140) || heads[0]; if (next) { next.scrollIntoView(); next.focus(); } }],
      c: ["lines: runs or conditions", () => patch({lines: settings().lines === "runs" ? "conditions" : null})],
      h: ["earlier step of the distribution", () => panel && panel.move(-1)], l: ["later step of the distribution", () => panel && panel.move(1)],
    },
  };
}
