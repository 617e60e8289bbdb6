// @ts-nocheck
// Problems: held-out problems by condition, before and after training, and how one of them evolved.

import {Card} from "../charts/card.js";
import {get, gone, newest} from "../api.js";
import {name as conditionName} from "../colours.js";
import {button, choice, el, failed, keepingFocus, later, loading, nothing, put, spaced} from "../dom.js";
import {NOTHING, percent, plural, shortened} from "../format.js";
import {runName} from "../names.js";
import {link} from "../router.js";
import {longText} from "./conversation.js";
import {family} from "./reading.js";

const PAGE = 100;
const SORTS = [["differ", "conditions differ most"], ["worse", "got worse"], ["better", "got better"], ["hard", "hardest"], ["problem", "as they come"]];

// A solve rate as a tinted box; the number says it too.
function rate(value) {
  return el("span", {class: `rate ${value === null ? "none" : `r${Math.round(10 * value)}`}`}, value === null ? NOTHING : percent(value, 0));
}

function cell({before, after, answers}) {
  const change = before === null || after === null ? 0 : after - before;
  const words = change > 0 ? `better by ${percent(change, 0)}` : change < 0 ? `worse by ${percent(-change, 0)}` : before === null || after === null ? "not known at both ends" : "unchanged";
  return el("td", {class: "rates", title: `${plural(answers, "answer")} after training; ${words}`}, rate(before), el("span", {class: "to", "aria-label": "to"}, "→"), rate(after),
    el("span", {class: `way ${change > 0 ? "good" : change < 0 ? "bad" : "muted"}`, role: "img", "aria-label": words}, change > 0 ? "▲" : change < 0 ? "▼" : "·"));
}

export function problems(root, state, frame) {
  const {patch} = frame;
  let query = state.query, body = null, runs = [], asked = "", askedOne = "", stopped = false, card = null, wanted = null;
  const next = newest(), nextOne = newest();
  const title = el("div", {class: "title"}, el("h1", null, "Problems"), el("p", {class: "muted"})), knobs = el("span", {class: "knobs"});
  const search = el("input", {type: "search", placeholder: "search in problems", "aria-label": "search in problems", value: query.text || "", on: {input: later(() => patch({text: search.value || null, first: null}, {replace: true}), 250)}});
  const tools = el("div", {class: "tools"}, search, knobs), list = el("section", {class: "list", "aria-label": "problems"}, loading("Reading the evaluations …")), beside = el("aside", {class: "beside", "aria-label": "the chosen problem"});
  const panes = el("div", {class: "panes"}, list, beside);
  put(root, title, tools, panes);

  function first() { return Math.max(0, Number(query.first) || 0); }
  function indexOf(label) { const run = runs.find((each) => each.label === label); return run ? run.index : body.conditions.indexOf(label); }
  // Which evaluations a condition is told by, and of which runs.
  function taken(label) {
    const {before, after, of, runs: count} = body.taken[label], all = (steps) => steps.join(", ");
    return `step ${all(before)}${after.length ? ` → ${all(after)}` : ", none after it"}${of === "all" ? `; ${plural(count, "unfinished run")}` : ""}`;
  }
  function url(id) { return link("problems", state.place, {...query, id}); }

  function drawTools() {
    keepingFocus(knobs, () => put(knobs, body.sets.length > 1 ? choice("held-out set", body.sets.map((each) => [each, each]), body.set, (value) => patch({set: value, first: null, id: null, tag: null})) : null,
      choice("sort", SORTS, query.sort || "differ", (value) => patch({sort: value === "differ" ? null : value, first: null})),
      body.tags.length ? choice("tag", [["", "any tag"], ...body.tags.map((each) => [each, each])], query.tag || "", (value) => patch({tag: value || null, first: null})) : null,
      el("span", {class: "legendline", "aria-hidden": "true"}, "solved: ", [0, 0.25, 0.5, 0.75, 1].map(rate))));
  }

  function drawList() {
    put(title, el("h1", null, "Problems"), el("p", {class: "muted"}, [body.set, plural(body.total, "problem"), plural(body.conditions.length, "condition")].join(" · ")));
    const to = (at) => patch({first: at || null});
    const pager = body.total <= PAGE && !first() ? null : el("div", {class: "tools"}, button("← previous", () => to(Math.max(0, first() - PAGE)), {disabled: first() === 0}),
      el("span", {class: "small"}, `${first() + 1} to ${first() + body.problems.length} of ${body.total}`), button("next →", () => to(first() + PAGE), {disabled: first() + PAGE >= body.total}));
    put(list, body.problems.length ? el("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": "solve rates"}, el("table", {class: "tight wide matrixtable"},
      el("thead", null, el("tr", null, el("th", {scope: "col"}, "problem"), body.conditions.map((label) => el("th", {scope: "col"}, conditionName(label, indexOf(label)), el("small", null, taken(label)))))),
      el("tbody", null, body.problems.map((each) => el("tr", {"data-id": each.id}, el("th", {scope: "row"}, el("a", {class: "quiet", href: url(each.id), title: each.id, dir: "auto"}, shortened(each.prompt || each.id, 130)), each.tags.map((tag) => [" ", el("span", {class: "chip"}, tag)])),
        body.conditions.map((label) => cell(each.rates[label]))))))) : nothing("No problem passes these filters", "Take the tag or the words of the search away."), pager);
    mark(false);
  }

  function mark(scroll) {
    for (const row of list.querySelectorAll("tr[data-id]")) {
      const on = row.dataset.id === query.id;
      row.classList.toggle("on", on);
      if (on) { row.setAttribute("aria-current", "true"); if (scroll) row.scrollIntoView({block: "nearest"}); } else row.removeAttribute("aria-current");
    }
    panes.classList.toggle("opened", query.id !== undefined);
  }

  function drawOne(found) {
    const lines = Object.entries(found.conditions).map(([label, points]) => ({name: label, index: indexOf(label), kind: "mean", sparse: true, x: points.map((each) => each.step), y: points.map((each) => each.rate)}));
    if (card) card.stop();
    card = new Card({title: "Solve rate", words: "over the answers of all seeds, by condition", height: 220, x: "step", unit: "%", share: true, range: {min: 0, max: 1}, full: true, counts: null});
    const of = (label) => runs.find((run) => run.place === state.place && run.label === label) || runs.find((run) => run.label === label), labels = Object.keys(found.conditions), same = {split: `eval/${found.set}`, problem: found.problem, order: query.sort};
    const pairs = labels.length > 1 ? labels.slice(1).map((label) => [`${labels[0]} and ${label}`, of(labels[0]), of(label), {}]) : [];
    const changes = labels.map((label) => { const points = found.conditions[label]; return [`${label}: step ${points[0].step} and ${points[points.length - 1].step}`, of(label), of(label), {step_a: points[0].step, step_b: points[points.length - 1].step}]; });
    put(beside, el("div", {class: "head"}, el("h2", null, shortened(found.problem, 120), found.tags.length ? el("small", null, found.tags.join(" · ")) : null), button("Close", () => patch({id: null}))),
      found.prompt ? longText(found.prompt, 3000, "said promptshort") : null, card.root,
      el("h3", null, "Same prompt, side by side"), el("ul", {class: "plain"}, [...pairs, ...changes].filter(([, a, b]) => a && b).map(([words, a, b, more]) => el("li", null, el("a", {href: link("prompt", state.place, {a: a.place, b: b.place, ...same, ...more})}, words)))),
      el("h3", null, "All answers"), el("ul", {class: "plain"}, labels.map(of).filter(Boolean).map((run) => el("li", null, el("a", {href: link("rollouts", run.place, {split: same.split, problem: found.problem})}, runName(run))))),
      el("details", null, el("summary", {class: "muted small"}, "as a table"), el("table", {class: "tight"}, el("thead", null, el("tr", null, ["condition", "step", "solved", "answers"].map((words) => el("th", {scope: "col"}, words)))),
        el("tbody", null, labels.map((label) => found.conditions[label].map((each) => el("tr", null, el("td", null, label), el("td", {class: "number"}, String(each.step)), el("td", {class: "number"}, percent(each.rate, 0)), el("td", {class: "number"}, String(each.answers)))))))));
    card.set(lines, {});
  }

  async function readOne() {
    if (query.id === undefined) { nextOne.stop(); askedOne = ""; if (card) card.stop(); card = null; put(beside); return; }
    const key = JSON.stringify([body.set, query.id]);
    if (key === askedOne) return;
    askedOne = key;
    try {
      const found = await get("problem", {at: state.place, set: body.set, id: query.id}, nextOne());
      if (!stopped) drawOne(found);
    } catch (error) {
      if (!stopped && !gone(error)) { askedOne = ""; put(beside, failed(error, readOne)); }
    }
  }

  async function read(force) {
    const question = {at: state.place, set: query.set, sort: query.sort, tag: query.tag, text: query.text, first: first(), count: PAGE}, key = JSON.stringify(question);
    try {
      if (key !== asked || force) {
        asked = key;
        const [found, all] = await Promise.all([get("problems", question, next()), family(state.place)]);
        if (stopped) return;
        body = found;
        runs = all;
        if (!body.sets.length) { put(title, el("h1", null, "Problems")); put(list, nothing("No evaluation yet", "Held-out problems appear here with the first evaluation ([evaluation] problems, [training] eval_every).")); tools.hidden = true; return; }
        tools.hidden = false;
        if (document.activeElement !== search) search.value = query.text || "";
        drawTools();
        drawList();
        if (wanted !== null && body.problems.length) { const row = body.problems[wanted > 0 ? 0 : body.problems.length - 1]; wanted = null; patch({id: row.id}, {replace: true}); return; }
      } else if (body) mark(true);
    } catch (error) {
      if (stopped || gone(error)) return;
      asked = "";
      put(list, failed(error, () => read(true)));
      return;
    }
    if (body && body.sets.length) readOne();
  }

  function move(by) {
    if (!body || !body.problems.length) return;
    const at = body.problems.findIndex((each) => each.id === query.id), to = at < 0 ? (by > 0 ? 0 : body.problems.length - 1) : at + by;
    if (body.problems[to]) { patch({id: body.problems[to].id}, {replace: query.id !== undefined}); return; }
    const start = first() + by * PAGE;
    if (start >= 0 && start < body.total) { wanted = by; patch({first: start || null}); }
  }

  const grow = spaced(() => { askedOne = ""; read(true); }, 3000);
  read();
  return {
    title: "Problems",
    update(to) { query = to.query; read(); },
    changed(event) { if ((event.what || []).includes("evals")) grow(); },
    stop() { stopped = true; next.stop(); nextOne.stop(); grow.stop(); if (card) card.stop(); },
    keys: {j: ["next problem", () => move(1)], k: ["previous problem", () => move(-1)], d: ["compare the answers (Same prompt)", () => { const anchor = beside.querySelector("ul a"); if (anchor) anchor.click(); }],
      s: ["next order", () => { const all = SORTS.map(([key]) => key), at = all.indexOf(query.sort || "differ"); patch({sort: all[(at + 1) % all.length], first: null}); }], Escape: ["close the problem", () => patch({id: null})]},
  };
}
