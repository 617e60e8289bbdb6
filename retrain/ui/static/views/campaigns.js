// @ts-nocheck
// All campaigns and runs below the given directories: state, verdict, difference, cost, the newest warning.

import {get, gone, newest} from "../api.js";
import {button, choice, el, failed, later, loading, notRecorded, nothing, put, spaced} from "../dom.js";
import {ago, clock, count, difference, hours, plural} from "../format.js";
import {step} from "../keys.js";
import {go, link} from "../router.js";
import {bar, classOf, reach} from "../verdicts.js";

const SORTS = {updated: "newest first", name: "by name", difference: "by difference", device_hours: "by device time"};
const STATES = ["running", "done", "failed", "stopped", "interrupted", "pending"];

function home(summary) {
  return link(summary.kind === "campaign" ? "campaign" : "metrics", summary.place);
}

function progress(summary) {
  const {done, planned} = summary.steps || {};
  if (!planned || done >= planned) return null;
  return el("progress", {max: planned, value: done || 0, "aria-label": `steps of ${summary.name}`});
}

function verdictCell(summary, most) {
  const verdict = summary.verdict;
  if (!verdict) return [el("td", {class: "verdict muted"}, summary.kind === "campaign" ? "no comparison yet" : "a single run"), el("td", {class: "bars"})];
  const unit = verdict.share ? " points" : "";
  const numbers = Number.isFinite(verdict.low) ? ` [${difference(verdict.low, verdict.share)}, ${difference(verdict.high, verdict.share)}]` : "";
  return [
    el("td", {class: `verdict ${classOf(verdict.word)}`}, el("b", null, verdict.word), el("span", {class: "sentence"}, verdict.sentence)),
    el("td", {class: "bars"}, bar(verdict, verdict.share ? most.share : reach([verdict])),
      el("div", {class: "numbers"}, `${difference(verdict.difference, verdict.share)}${unit}`, el("span", {class: "muted"}, numbers))),
  ];
}

function row(summary, most) {
  const {runs, seeds} = summary;
  const parts = [runs.running ? `${runs.running} running` : "", runs.failed ? `${runs.failed} failed` : ""].filter(Boolean).join(", ");
  return el("tr", null,
    el("td", {class: "what"},
      el("a", {class: "open", href: home(summary), title: summary.place}, summary.name),
      el("span", {class: `pill ${summary.state}`}, summary.state),
      summary.source !== "retrain" ? el("span", {class: "chip"}, summary.source) : null,
      el("div", {class: "muted small"}, summary.place),
      summary.note && summary.note.level !== "info" ? el("div", {class: "small note warn"},
        el("a", {href: link("notes", summary.place), class: "quiet"}, `step ${summary.note.step}, ${summary.note.run}: ${summary.note.text}`)) : null,
      notRecorded(summary.missing)),
    verdictCell(summary, most),
    el("td", {class: "number", "data-name": "seeds"}, seeds.planned ? `${seeds.done} of ${seeds.planned}` : "–",
      parts ? el("div", {class: `small ${runs.failed ? "bad" : "muted"}`}, parts) : null),
    el("td", {class: "number", "data-name": "steps"}, summary.steps && summary.steps.planned ? `${count(summary.steps.done)} of ${count(summary.steps.planned)}` : count(summary.steps && summary.steps.done),
      progress(summary)),
    el("td", {class: "number", "data-name": "device time"}, hours(summary.device_hours)),
    el("td", {class: "number", "data-name": "changed"}, el("time", {title: summary.updated ? clock(summary.updated) : null}, ago(summary.updated))));
}

function chosen(places, query) {
  const words = (query.q || "").toLowerCase().split(/\s+/).filter(Boolean);
  const keep = places.filter((each) => (!query.state || each.state === query.state) &&
    words.every((word) => `${each.place} ${(each.conditions || []).join(" ")} ${each.source}`.toLowerCase().includes(word)));
  const value = {name: (each) => each.name, difference: (each) => -(each.verdict ? each.verdict.difference : -Infinity),
    device_hours: (each) => -(each.device_hours || 0)}[query.sort] || ((each) => -(each.updated || 0));
  return keep.sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0));
}

function counts(places) {
  const total = places.reduce((sum, each) => sum + (each.device_hours || 0), 0);
  const running = places.filter((each) => each.state === "running").length;
  return [plural(places.filter((each) => each.kind === "campaign").length, "campaign"), running ? `${running} running` : "",
    total ? `${hours(total)} of device time` : ""].filter(Boolean).join(" · ");
}

export function campaigns(root, state, frame) {
  const {patch} = frame, next = newest();
  let query = state.query, places = null, reading = null;
  const list = el("div", null, loading("Reading the directories …"));
  const about = el("p", {class: "muted about"});
  const search = el("input", {type: "search", placeholder: "search name, condition …", "aria-label": "search campaigns", value: query.q || "",
    on: {input: later(() => patch({q: search.value}, {replace: true}), 120)}});
  const states = el("div", {class: "segments", role: "group", "aria-label": "state"});
  put(root, el("div", {class: "title"}, el("h1", null, "Campaigns"), about),
    el("div", {class: "tools"}, search, states,
      choice("order", Object.entries(SORTS), query.sort || "updated", (value) => patch({sort: value === "updated" ? null : value}))), list);

  function draw() {
    if (!places) return;
    const rows = chosen([...places], query);
    const most = {share: reach(places.map((each) => each.verdict).filter((each) => each && each.share))};
    const used = STATES.filter((each) => places.some((place) => place.state === each));
    about.textContent = counts(places);
    put(states, [["", "all"], ...used.map((each) => [each, each])].map(([value, text]) =>
      button(text, () => patch({state: value}), {"aria-pressed": String((query.state || "") === value)})));
    if (!places.length) {
      put(list, reading && reading.done < reading.of ? loading(`Reading ${reading.done} of ${reading.of} directories …`) : nothing("Nothing to show yet",
        "There is no campaign and no run below the given directories. `retrain campaigns/quickstart.toml` trains one in a minute; it appears here by itself."));
      return;
    }
    if (!rows.length) { put(list, nothing("No campaign matches", "Clear the search, or choose another state.")); return; }
    const scroll = document.activeElement && list.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    put(list, reading && reading.done < reading.of ? loading(`Reading ${reading.done} of ${reading.of} directories …`) : null,
      el("table", {class: "campaigns"}, el("thead", null, el("tr", null,
        ["campaign", "verdict", "typical difference, 95 %"].map((text) => el("th", {scope: "col"}, text)),
        ["seeds", "steps", "device time", "changed"].map((text) => el("th", {scope: "col", class: "number"}, text)))),
      el("tbody", null, rows.map((each) => row(each, most)))));
    if (scroll) { const again = [...list.querySelectorAll("a.open")].find((each) => each.getAttribute("href") === scroll); if (again) again.focus({preventScroll: true}); }
  }

  async function read() {
    try {
      const body = await get("places", {}, next());
      ({places, reading} = body);
      frame.places(places);
      draw();
      if (reading && reading.done < reading.of) more();
    } catch (error) {
      if (!gone(error)) put(list, failed(error, read));
    }
  }
  const soon = spaced(read, 1000), more = later(read, 400);
  read();
  const clockwork = setInterval(draw, 30000);
  return {
    title: "Campaigns",
    update(next) { query = next.query; if (document.activeElement !== search) search.value = query.q || ""; draw(); },
    changed: soon,
    stop() { next.stop(); clearInterval(clockwork); soon.stop(); more.stop(); },
    keys: {
      j: ["next campaign", () => step("a.open", 1)], k: ["previous campaign", () => step("a.open", -1)],
      Enter: ["open it", () => { const first = list.querySelector("a.open"); if (first) go(first.getAttribute("href")); }],
    },
  };
}
