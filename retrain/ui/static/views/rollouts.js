// @ts-nocheck
// Rollouts of a step: how rewards lie, groups as strips, samples to sort and filter, and one of them opened beside.

import {get, gone, newest} from "../api.js";
import {button, choice, el, failed, keepingFocus, loading, nothing, put, spaced} from "../dom.js";
import {number, plural} from "../format.js";
import {link} from "../router.js";
import {outcome, promptOf, strip, turnsOf} from "./conversation.js";
import {Steps, family, promptLink, runChoice, runsOf, splitName} from "./reading.js";
import {FILTERS, filters, groups, rewards, table} from "./rollouts_parts.js";

const PAGE = 100, SIDE_BY_SIDE = 16;

export function rollouts(root, state, frame) {
  const {patch} = frame;
  let query = state.query, runs = [], kin = [], every = [], everyOf = "", body = null, open = null, stopped = false, asked = "", askedOpen = "", wanted = null, recent = -Infinity;
  const next = newest(), nextOpen = newest(), nextList = newest(), steps = new Steps("step", (step) => patch({iteration: step, first: null}, {replace: true}));
  const title = el("div", {class: "title"}, el("h1", null, "Rollouts"), el("p", {class: "muted"})), tools = el("div", {class: "tools"});
  const overview = el("div", {class: "overview"}), sieve = filters(patch), list = el("section", {class: "list", "aria-label": "rollouts"}, loading()), beside = el("aside", {class: "beside", "aria-label": "the chosen rollout"});
  const panes = el("div", {class: "panes"}, list, beside), page = el("div", {class: "stack"}, overview, sieve.root, panes);
  put(root, title, tools, page);

  function run() { return query.run || (runs.some((each) => each.place === state.place) || !runs.length ? state.place : runs[0].place); }
  function split() { return query.split || "train"; }
  function index() { return query.index === undefined ? null : Number(query.index); }
  function first() { return Math.max(0, Number(query.first) || 0); }
  function asking() {
    const all = {at: run(), split: split(), iteration: query.iteration, sort: query.sort, down: query.down, first: first(), count: PAGE};
    for (const key of FILTERS) all[key] = query[key];
    return all;
  }

  // A chosen sample fixes its step, as the newest one moves on while a run trains; the list is the same one then.
  function choose(i, options) {
    patch({iteration: body.about.iteration, index: i}, options);
  }

  function close() {
    const newestNow = body && steps.beside(1) === null;
    if (newestNow) asked = JSON.stringify({...asking(), iteration: undefined});
    patch({index: null, beside: null, ...(newestNow ? {iteration: null} : {})});
  }

  function drawTools() {
    const splits = [...new Set(every.map((each) => each.split))];
    const all = every.filter((each) => each.split === split()).map((each) => each.iteration);
    if (body) steps.set(all, body.about.iteration);
    keepingFocus(tools, () => put(tools, runs.length > 1 ? runChoice("run", runs, run(), (value) => patch({run: value, index: null, first: null, iteration: null})) : null,
      splits.length > 1 ? choice("split", splits.map((each) => [each, splitName(each)]), split(), (value) => patch({split: value === "train" ? null : value, iteration: null, index: null, first: null, group: null, problem: null})) : null, steps.root,
      body && !body.about.recorded ? el("span", {class: "small muted"}, "this step has no token file: texts may be shortened") : null));
  }

  function drawOverview() {
    const bar = query.reward_min !== undefined && query.reward_max !== undefined ? [query.reward_min, query.reward_max] : null;
    keepingFocus(overview, () => put(overview, rewards(body.histogram, bar, (ends) => patch({reward_min: ends ? ends[0] : null, reward_max: ends ? ends[1] : null, first: null})),
      groups(body.groups, {group: query.group === undefined ? null : Number(query.group), index: index(), pickGroup: (group) => patch({group, first: null}), pickSample: (i) => choose(i)})));
  }

  function pager() {
    if (body.passing <= PAGE && !first()) return null;
    const to = (at) => patch({first: at || null});
    return el("div", {class: "tools"}, button("← previous", () => to(Math.max(0, first() - PAGE)), {disabled: first() === 0}), el("span", {class: "small"}, `${body.rollouts.length ? first() + 1 : 0} to ${first() + body.rollouts.length} of ${body.passing}`),
      button("next →", () => to(first() + PAGE), {disabled: first() + PAGE >= body.passing}));
  }

  function drawList() {
    const {about} = body;
    put(title, el("h1", null, "Rollouts"), el("p", {class: "muted"}, [splitName(about.split), `step ${about.iteration}`, plural(body.groups.length, "group"), body.passing === body.total ? plural(body.total, "rollout") : `${body.passing} of ${plural(body.total, "rollout")}`,
      about.correct === null || about.correct === undefined ? null : `${about.correct} correct`].filter(Boolean).join(" · ")));
    sieve.write(query, body);
    keepingFocus(list, () => put(list, body.rollouts.length ? table(body.rollouts, query, {set: patch, index: index(), href: (i) => link("rollouts", state.place, {...query, iteration: about.iteration, index: i})})
      : nothing("No rollout passes these filters", `${body.total} were sampled in this step.`), pager()));
    mark(false);
  }

  // The chosen row, without drawing the table anew.
  function mark(scroll) {
    for (const row of list.querySelectorAll("tr[data-index]")) {
      const on = Number(row.dataset.index) === index();
      row.classList.toggle("on", on);
      if (on) { row.setAttribute("aria-current", "true"); if (scroll) row.scrollIntoView({block: "nearest"}); } else row.removeAttribute("aria-current");
    }
    for (const row of overview.querySelectorAll(".grouprow")) row.querySelectorAll(".bead").forEach((bead) => bead.setAttribute("aria-pressed", "false"));
    const {groups: all} = body;
    all.forEach((group, k) => { const at = group.samples.findIndex((each) => each.index === index()); if (at >= 0) { const row = overview.querySelectorAll(".grouprow")[k]; if (row) row.querySelectorAll(".bead")[at].setAttribute("aria-pressed", "true"); } });
    panes.classList.toggle("opened", index() !== null);
  }

  function drawOpen() {
    const {prompt, line, siblings, about} = open, at = index(), many = siblings.length > 1;
    const place = {split: query.split, iteration: about.iteration, index: at};
    const twin = promptLink(kin, state.place, run(), about, prompt.problem_id, siblings.findIndex((each) => each.index === at));
    put(beside, el("div", {class: "head"}, el("h2", null, prompt.problem_id ?? `rollout ${at}`, el("small", null, [`sample ${line.sample}`, ...(prompt.tags || [])].join(" · "))), button("Close", close)),
      el("div", {class: "tools"}, many ? strip(siblings, at, (i) => choose(i), "siblings") : null,
        many ? button("side by side", () => patch({beside: query.beside === "1" ? null : 1}), {"aria-pressed": String(query.beside === "1"), title: "all samples of the group beside each other"}) : null,
        el("a", {class: "small", href: link("tokens", run(), place)}, "Tokens"), el("a", {class: "small", href: link("rollouts", state.place, {run: query.run, split: query.split, iteration: query.iteration, problem: prompt.problem_id, index: at})}, "only this problem"),
        twin ? el("a", {class: "small", href: twin}, "Same prompt") : null),
      query.beside === "1" ? null : outcome(line), promptOf(prompt), query.beside === "1" ? el("div", {class: "siblings"}, loading()) : turnsOf(line));
    beside.scrollTop = 0;
    if (query.beside === "1") drawSiblings(siblings.slice(0, SIDE_BY_SIDE), siblings.length);
  }

  async function drawSiblings(siblings, of) {
    const box = beside.querySelector(".siblings");
    try {
      const about = {at: run(), split: split(), iteration: open.about.iteration};
      const all = await Promise.all(siblings.map((each) => get("rollout", {...about, index: each.index})));
      if (!box.isConnected) return;
      put(box, all.map((each, k) => el("article", {class: siblings[k].index === index() ? "on" : ""}, el("h3", null, `sample ${each.line.sample}`, el("small", null, `${each.line.reward === null ? "not graded" : `reward ${number(each.line.reward)}`} ${each.line.correct ? "✓" : "✗"}`)), turnsOf(each.line))),
        of > siblings.length ? el("p", {class: "muted"}, `and ${of - siblings.length} further samples`) : null);
    } catch (error) { if (box.isConnected) put(box, failed(error)); }
  }

  async function read(force) {
    try {
      if (!runs.length) [runs, kin] = await Promise.all([runsOf(state.place), family(state.place)]);
      const question = asking(), key = JSON.stringify(question);
      const pinned = body && query.iteration === String(body.about.iteration) && JSON.stringify({...question, iteration: undefined}) === asked;
      if (pinned) asked = key;
      const fresh = key !== asked || force;
      if (fresh) {
        asked = key;
        nextList.stop();
        const signal = next();
        const listed = get("iterations", {at: question.at}, signal);
        // Of a split that the run does not have, nothing is asked.
        if (everyOf !== question.at || !sampled()) {
          every = (await listed).iterations;
          everyOf = question.at;
          if (stopped) return;
          if (!sampled()) { asked = ""; otherSplit(); return; }
        }
        const [found, iterations] = await Promise.all([get("rollouts", question, signal), listed]);
        if (stopped) return;
        body = found;
        every = iterations.iterations;
        if (!page.isConnected) put(root, title, tools, page);
        drawTools();
        drawOverview();
        drawList();
        land();
      } else if (body) mark(true);
    } catch (error) {
      if (stopped || gone(error)) return;
      asked = "";
      put(list, failed(error, () => read(true)));
    }
    if (!stopped) readOpen();
  }

  function sampled() { return every.some((each) => each.split === split()); }

  function otherSplit() {
    if (!every.length) { body = null; drawTools(); put(overview); put(beside); put(list, nothing("Nothing has been sampled yet", "Rollouts appear here with the first step.")); } else patch({split: every[0].split, iteration: null}, {replace: true});
  }

  async function readOpen() {
    if (index() === null) { nextOpen.stop(); open = null; askedOpen = ""; put(beside); return; }
    const key = JSON.stringify([run(), split(), query.iteration, index(), query.beside]);
    if (key === askedOpen) return;
    askedOpen = key;
    try {
      const found = await get("rollout", {at: run(), split: split(), iteration: query.iteration, index: index()}, nextOpen());
      if (stopped) return;
      open = found;
      drawOpen();
    } catch (error) {
      if (!stopped && !gone(error)) { askedOpen = ""; put(beside, failed(error, readOpen)); }
    }
  }

  // j at the end of a page goes to the first of the next.
  function land() {
    if (wanted === null || !body.rollouts.length) { wanted = null; return; }
    const row = wanted > 0 ? body.rollouts[0] : body.rollouts[body.rollouts.length - 1];
    wanted = null;
    choose(row.index, {replace: true});
  }

  function sample(by) {
    if (!body || !body.rollouts.length) return;
    const at = body.rollouts.findIndex((row) => row.index === index());
    const to = at < 0 ? (by > 0 ? 0 : body.rollouts.length - 1) : at + by;
    if (body.rollouts[to]) { choose(body.rollouts[to].index, {replace: index() !== null}); return; }
    const start = first() + by * PAGE;
    if (start >= 0 && start < body.passing) { wanted = by; patch({first: start || null}); }
  }

  function group(by) {
    if (!body) return;
    const passing = body.groups, at = passing.findIndex((each) => each.samples.some((one) => one.index === index()));
    const to = passing[at < 0 ? 0 : at + by];
    if (!to) return;
    if (query.group === undefined) choose(to.samples[0].index, {replace: true}); else patch({iteration: body.about.iteration, index: to.samples[0].index, group: to.group, first: null}, {replace: true});
  }

  function move(by) { const step = steps.beside(by); if (step !== null) patch({iteration: step, first: null}); }

  const grow = spaced(() => { if (performance.now() - recent > 2000) { recent = performance.now(); read(query.iteration === undefined || !body); if (query.iteration !== undefined) iterationsAgain(); } }, 3000);
  async function iterationsAgain() {
    try {
      every = (await get("iterations", {at: run()}, nextList())).iterations;
      drawTools();
    } catch (error) { if (!gone(error)) console.warn(error); }
  }
  read();
  return {
    title: "Rollouts",
    update(to) {
      const choice = query.reward_min !== to.query.reward_min || query.reward_max !== to.query.reward_max || query.group !== to.query.group;
      query = to.query;
      if (choice && body) drawOverview();
      read();
    },
    changed(event) { if ((event.what || []).some((each) => each === "metrics" || each === "evals")) grow(); },
    stop() { stopped = true; next.stop(); nextOpen.stop(); nextList.stop(); grow.stop(); },
    keys: {j: ["next sample", () => sample(1)], k: ["previous sample", () => sample(-1)], h: ["step back", () => move(-1)], l: ["step forward", () => move(1)], g: ["next group", () => group(1)], G: ["previous group", () => group(-1)],
      Enter: ["open the chosen sample's tokens", () => { const anchor = beside.querySelector("a"); if (anchor) anchor.click(); }], Escape: ["close the sample", close]},
  };
}
