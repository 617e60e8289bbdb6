// @ts-nocheck
// Any two campaigns or runs: in what they differ. Configuration, code, environment, data and initial adapter.

import {get, gone, newest} from "../api.js";
import {el, failed, loading, nothing, put, spaced} from "../dom.js";
import {plural} from "../format.js";

function text(value) {
  if (value === null || value === undefined) return el("span", {class: "muted"}, "not set");
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

function differing(rows, names) {
  return el("div", {class: "scroll"}, el("table", {class: "tight diff"}, el("thead", null, el("tr", null, el("th", {scope: "col"}, "key"), names.map((name) => el("th", {scope: "col"}, name)))),
      el("tbody", null, rows.map((row) => el("tr", null, el("th", {scope: "row"}, el("code", null, row.key)), el("td", null, text(row.a)), el("td", null, text(row.b)))))));
}

function table(title, rows, names, none) {
  return el("section", null, el("h2", null, title, el("small", null, rows.length ? plural(rows.length, "difference") : "")),
    rows.length ? differing(rows, names) : el("p", {class: "muted"}, none));
}

function hashes(rows, names) {
  if (!rows || !rows.length) return null;
  return el("section", null, el("h2", null, "Data and starting point"), el("div", {class: "scroll"}, el("table", {class: "tight"},
    el("thead", null, el("tr", null, ["what", "", ...names].map((name) => el("th", {scope: "col"}, name || el("span", {class: "away"}, "same"))))),
    el("tbody", null, rows.filter((row) => row.a !== null || row.b !== null).map((row) => el("tr", null, el("th", {scope: "row"}, row.name),
      el("td", null, row.same === null || row.same === undefined ? el("span", {class: "muted"}, "unknown") : row.same ? el("span", {class: "good"}, "same") : el("b", {class: "bad"}, "differs")),
      [row.a, row.b].map((value) => el("td", null, el("code", {title: value}, value === null || value === undefined ? "–" : String(value).slice(0, 16))))))))));
}

function diff(title, content) {
  if (!content) return null;
  const css = (line) => /^(\+\+\+|---|diff |index )/.test(line) ? "muted" : line.startsWith("@@") ? "hunk" : line.startsWith("+") ? "plus" : line.startsWith("-") ? "minus" : "";
  const lines = content.split("\n"), most = 3000;
  return el("details", {open: lines.length < 80}, el("summary", null, title, el("span", {class: "muted"}, ` ${plural(lines.length, "line")}`)),
    el("pre", {class: "patch", tabindex: "0"}, lines.slice(0, most).map((line) => el("div", {class: css(line)}, line || " ")), lines.length > most ? `… ${lines.length - most} further lines` : null));
}

function code(part, names) {
  if (!part) return null;
  const same = part.same_diff && !part.facts.length;
  return el("section", null, el("h2", null, "Code"),
    el("p", null, same ? el("span", {class: "good"}, "The same code, also in what was not committed.") : el("b", {class: "bad"}, "Not the same code.")),
    part.facts.length ? differing(part.facts, names) : null,
    part.same_diff ? null : diff("In what the changes that were not committed differ", (part.diff || []).join("\n")),
    part.cut ? el("p", {class: "muted"}, "These changes are too long to show whole: code.diff in the two directories has them.") : null);
}

export function compare(root, state, frame) {
  const {patch} = frame, next = newest(), nextPlaces = newest();
  let query = state.query, places = [], shown = "", drawn = "";
  const tools = el("div", {class: "tools"}), body = el("div");
  put(root, el("div", {class: "title"}, el("h1", null, "Compare"), el("p", {class: "muted"}, "in what two campaigns or runs differ")), tools, body);

  const list = el("datalist", {id: "places"}), picker = (name, words) => {
    const field = el("input", {type: "text", class: "place", list: "places", "aria-label": words, placeholder: "a campaign or a run …", on: {change: () => patch({[name]: field.value || null})}});
    return field;
  };
  const a = picker("a", "first place"), b = picker("b", "second place");
  tools.append(el("span", null, a), el("span", {class: "muted"}, "and"), el("span", null, b), list);

  function drawTools() {
    for (const [field, value] of [[a, query.a || state.place], [b, query.b || ""]]) if (document.activeElement !== field) field.value = value;
    put(list, places.map((each) => el("option", {value: each})));
  }

  async function read() {
    const about = {a: query.a || state.place, b: query.b};
    if (!about.b) { next.stop(); shown = ""; put(body, nothing("Choose the second place", "Any campaign or run below the given directories: type a part of its name.")); return; }
    if (shown !== JSON.stringify(about)) { shown = ""; put(body, loading()); }
    try {
      const answer = await get("compare", about, next()), {a: first, b: second, ...parts} = answer, text = JSON.stringify(parts);
      // The same answer again leaves what is open as it is.
      if (shown && text === drawn) return;
      shown = JSON.stringify(about);
      drawn = text;
      const names = [first, second].map((each, i) => each && (each.run_id || each.place) || [about.a, about.b][i]);
      put(body, hashes(answer.hashes, names), table("Configuration", answer.config || [], names, "No key differs."), code(answer.code, names),
        table("Machine", answer.environment || [], names, "The same machine, as far as it was recorded."), table("Packages", answer.packages || [], names, "The same packages."));
    } catch (error) {
      if (gone(error)) return;
      shown = "";
      put(body, failed(error, read));
    }
  }

  async function start() {
    try {
      const signal = nextPlaces(), all = (await get("places", {}, signal)).places;
      const own = await get("campaign", {at: state.place}, signal).catch((error) => { if (gone(error)) throw error; return null; });
      places = [...(own ? own.runs.map((run) => run.place) : []), ...all.map((each) => each.place)];
      drawTools();
      if (own && !query.b && own.runs.length > 1 && !query.a) {
        const other = own.runs.find((run) => run.label !== own.runs[0].label) || own.runs[1];
        patch({a: own.runs[0].place, b: other.place}, {replace: true});
      }
    } catch (error) { if (!gone(error)) console.warn(error); }
  }
  drawTools();
  read();
  start();
  const again = spaced(() => { start(); if (query.b) read(); }, 5000);
  return {
    title: "Compare",
    update(to) { query = to.query; drawTools(); read(); },
    changed: again,
    stop() { next.stop(); nextPlaces.stop(); again.stop(); },
    keys: {},
  };
}
