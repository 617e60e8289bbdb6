// What was remarked about the runs, and the log of a run from its end backwards; both with search.

import {get, gone, newest} from "../api.js";
import {button, choice, el, failed, keepingFocus, later, loading, nothing, put, spaced} from "../dom.js";
import {plural} from "../format.js";
import {step} from "../keys.js";
import {runName} from "../names.js";
import {link} from "../router.js";

const LEVELS = [["", "all notes"], ["warning", "warnings"], ["info", "info"]];

function noteRow(note) {
  return el("li", {class: `note ${note.level}`, tabindex: "-1"},
    el("div", {class: "head"}, el("b", {class: note.level === "warning" ? "warn" : ""}, note.text),
      el("span", {class: "muted small"}, el("a", {href: link("metrics", note.place), class: "quiet"}, note.run || note.place), `, step ${note.step}`)),
    note.remedy ? el("div", {class: "muted"}, note.remedy) : null);
}

function lineClass(level) {
  return {warning: "warn", error: "bad", critical: "bad"}[(level || "").toLowerCase()] || "";
}

// The parts of a text with what was searched for marked; a search that is no expression is taken literally.
function marked(text, search) {
  if (!search) return [text];
  const at = text.toLowerCase().indexOf(search.toLowerCase());
  if (at < 0) return [text];
  return [text.slice(0, at), el("mark", null, text.slice(at, at + search.length)), text.slice(at + search.length)];
}

export function notes(root, state, frame) {
  const {patch} = frame, nextNotes = newest(), nextLog = newest(), nextEnd = newest(), nextRuns = newest();
  let query = state.query, runs = null, before = null, lines = [], asked = "", shown = null;
  const search = el("input", {type: "search", placeholder: "search notes and log", "aria-label": "search notes and log", value: query.q || "",
    on: {input: later(() => patch({q: search.value || null}, {replace: true}), 200)}});
  const tools = el("div", {class: "tools"}), list = el("div", null, loading()), logHead = el("div", {class: "tools"});
  const log = el("div", {class: "log", tabindex: "0", role: "log", "aria-label": "run.log"}), older = el("div", {class: "older"});
  put(root, el("div", {class: "title"}, el("h1", null, "Notes and logs")), tools, el("section", null, el("h2", null, "Notes"), list),
    el("section", null, el("h2", null, "Log"), logHead, older, log));

  function run() {
    return query.run || (runs && runs.length ? runs[0].place : state.place);
  }

  function drawTools() {
    keepingFocus(tools, () => tools.replaceChildren(search, choice("level", LEVELS, query.level || "", (value) => patch({level: value || null}))));
    keepingFocus(logHead, () => put(logHead, runs && runs.length > 1 ? choice("run", runs.map((each) => [each.place, `${runName(each)} (${each.state})`]), run(), (value) => patch({run: value})) : null,
      el("span", {class: "muted small"}, "newest lines at the end")));
  }

  async function readNotes() {
    try {
      const body = await get("notes", {at: state.place, search: query.q, level: query.level}, nextNotes());
      const rows = body.notes;
      put(list, rows.length ? el("ul", {class: "notes"}, rows.slice(0, 300).map(noteRow))
        : el("p", {class: "muted"}, query.q || query.level ? "None matches the search." : "Nothing odd was noticed in these runs."),
      body.total > 300 ? el("p", {class: "muted"}, `${plural(body.total - 300, "further note")}: search for them.`) : null);
    } catch (error) {
      if (!gone(error)) put(list, failed(error, readNotes));
    }
  }

  function drawLog(keep) {
    const top = log.scrollTop, end = log.scrollHeight - top - log.clientHeight < 30 || !keep;
    put(log, lines.length ? lines.map(({text, level}) => el("div", {class: lineClass(level)}, marked(text, query.q))) : el("p", {class: "state"}, query.q ? "No line matches." : "The log is empty."));
    put(older, before !== null && before !== undefined ? button("Older lines", () => readLog(before)) : null);
    log.scrollTop = end ? log.scrollHeight : top;
  }

  async function readLog(at) {
    nextEnd.stop();
    asked = JSON.stringify([run(), query.q]);
    try {
      const body = await get("log", {at: run(), search: query.q, before: at}, nextLog());
      const height = log.scrollHeight;
      lines = at === undefined ? body.lines : [...body.lines, ...lines];
      before = body.before;
      shown = asked;
      drawLog(at !== undefined);
      if (at !== undefined) log.scrollTop = log.scrollHeight - height;
    } catch (error) {
      if (gone(error)) return;
      asked = "";
      put(log, failed(error, () => readLog(at)));
    }
  }

  // New lines at the end: the newest page is read, and what is known already is left as it is.
  async function readEnd() {
    if (!asked) readLog();
    if (shown !== asked) return;
    try {
      const body = await get("log", {at: run(), search: query.q}, nextEnd());
      const last = lines.length ? lines[lines.length - 1].byte : -1, fresh = body.lines.filter((line) => line.byte > last);
      if (!fresh.length) return;
      lines = [...lines, ...fresh].slice(-5000);
      drawLog(true);
    } catch (error) { if (!gone(error)) console.warn(error); }
  }

  async function start() {
    try {
      const {runs: all} = await get("campaign", {at: state.place}, nextRuns());
      runs = all && all.length ? all : null;
    } catch (error) {
      if (gone(error)) return;
      runs = null;
    }
    drawTools();
    readLog();
  }
  drawTools();
  readNotes();
  start();
  const soon = spaced(readEnd, 2000), notesSoon = spaced(readNotes, 3000);
  return {
    title: "Notes and logs",
    update(to) {
      query = to.query;
      if (document.activeElement !== search) search.value = query.q || "";
      drawTools();
      readNotes();
      if (asked !== JSON.stringify([run(), query.q])) readLog();
    },
    changed(event) { soon(); if (!event.what || event.what.includes("notes")) notesSoon(); },
    stop() { [nextNotes, nextLog, nextEnd, nextRuns].forEach((each) => each.stop()); soon.stop(); notesSoon.stop(); },
    keys: {j: ["next note", () => step("li.note", 1)], k: ["previous note", () => step("li.note", -1)]},
  };
}
