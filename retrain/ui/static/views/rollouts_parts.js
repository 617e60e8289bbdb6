// @ts-nocheck
// Parts of the Rollouts page: the histogram of rewards to click, groups as strips, filters, and the table.

import {button, choice, el, later, svg} from "../dom.js";
import {NOTHING, number, plural, shortened} from "../format.js";
import {strip} from "./conversation.js";
import {shortName} from "./reading.js";

export const SORTS = {index: "as sampled", reward: "reward", advantage: "advantage", length: "length", turns: "turns", errors: "tool errors"};
export const FILTERS = ["reward_min", "reward_max", "length_min", "length_max", "group", "problem", "tag", "stop", "kept", "text", "errors"];

// Bars of {ends, counts, at, absent}: each a button that shows only its rollouts; pick(low, high) or pick(null) to take it back.
export function rewards({ends, counts, at, absent}, chosen, pick) {
  const most = Math.max(1, ...counts), wide = 560, tall = 96, room = wide / Math.max(1, counts.length);
  const bars = counts.map((n, i) => {
    const low = at ? at[i] : ends[i], high = at ? at[i] : ends[i + 1];
    const on = chosen && Number(chosen[0]) === low && Number(chosen[1]) === high;
    const words = `${plural(n, "rollout")} with reward ${at ? number(low) : `${number(low)} to ${number(high)}`}`;
    const act = () => pick(on ? null : [low, high]);
    const size = n ? Math.max(2, n / most * tall) : 0;
    return svg("g", {class: `bin ${on ? "on" : ""}`, role: "button", tabindex: "0", "aria-pressed": String(Boolean(on)), "aria-label": words,
      on: {click: act, keydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); event.stopPropagation(); act(); } }}},
    svg("title", null, words), svg("rect", {class: "hit", x: i * room, y: 0, width: room, height: tall + 18}),
    svg("rect", {class: "bar", x: i * room + Math.min(2, room * 0.1), y: tall + 16 - size, width: Math.max(1, room - Math.min(4, room * 0.2)), height: size}),
    counts.length <= 12 ? svg("text", {x: (i + 0.5) * room, y: tall + 12 - size, "text-anchor": "middle"}, String(n)) : null);
  });
  const label = (i) => number(at ? at[i] : i === counts.length ? ends[i] : ends[i]);
  const ticks = at && at.length <= 12 ? at.map((_, i) => svg("text", {x: (i + 0.5) * room, y: tall + 32, "text-anchor": "middle"}, label(i)))
    : counts.length ? [0, 1, 2, 3, 4].map((k) => Math.round(k / 4 * (at ? counts.length - 1 : counts.length))).map((i, k) => svg("text", {x: Math.min(wide, (i + (at ? 0.5 : 0)) * room), y: tall + 32, "text-anchor": ["start", "middle", "middle", "middle", "end"][k]}, label(i))) : null;
  return el("div", {class: "rewards"}, el("h2", null, "Rewards", el("small", null, "choose a bar to see only its rollouts", absent ? ` · ${absent} without a reward` : "")),
    counts.length ? svg("svg", {class: "chart", viewBox: `0 0 ${wide} ${tall + 38}`, role: "group", "aria-label": "histogram of rewards"}, svg("line", {class: "grid", x1: 0, x2: wide, y1: tall + 16.5, y2: tall + 16.5}), bars, ticks)
      : el("p", {class: "muted"}, "No rollout of this step has a reward."));
}

const MANY = 120;

// Groups as strips of their samples, the first ones of many; a group's name shows only its rollouts.
export function groups(list, {group, index, pickGroup, pickSample}) {
  return el("div", {class: "groupsbox"}, el("h2", null, "Groups", el("small", null, `${plural(list.length, "group")}: ✓ correct, ✗ not, ? not graded; struck through: discarded`)),
    el("div", {class: "groups", tabindex: "0", role: "region", "aria-label": "groups"}, list.slice(0, MANY).map((each) => el("div", {class: `grouprow ${each.discarded ? "dropped" : ""}`},
      button(shortName(each.problem_id ?? each.group, 24), () => pickGroup(each.group === group ? null : each.group),
        {class: "bare", "aria-pressed": String(each.group === group), title: `group ${each.group}: ${each.problem_id}${each.discarded ? `, discarded: ${each.discarded}` : ""}${each.tags.length ? `, ${each.tags.join(", ")}` : ""}`}),
      strip(each.samples, index, pickSample, `samples of group ${each.group}`),
      each.discarded ? el("span", {class: "small muted"}, each.discarded) : null)),
    list.length > MANY ? el("p", {class: "small muted"}, `and ${list.length - MANY} further groups: g goes through all of them`) : null));
}

function typed(label, key, query, set, {wide, kind = "text", hint} = {}) {
  const field = el("input", {type: kind, value: query[key] || "", placeholder: hint || "", "aria-label": label, class: wide ? "wide" : "narrow", inputmode: kind === "text" && !wide ? "decimal" : null,
    on: {input: later(() => {
      const wrong = !wide && field.value && !Number.isFinite(Number(field.value));
      field.classList.toggle("wrong", Boolean(wrong));
      if (!wrong) set({[key]: field.value || null, first: null}, {replace: true});
    }, 250)}});
  return field;
}

// The row of filters. It is drawn once; `write` brings what the URL says into it.
export function filters(set) {
  const fields = {text: typed("search in the texts", "text", {}, set, {wide: true, kind: "search", hint: "search in the texts"})};
  for (const [key, hint] of [["reward_min", "from"], ["reward_max", "to"], ["length_min", "from"], ["length_max", "to"]]) fields[key] = typed(key.replace("_min", " at least").replace("_max", " at most"), key, {}, set, {hint});
  const changing = el("span", {class: "knobs"}), clear = button("Clear filters", () => set(Object.fromEntries([...FILTERS, "first"].map((key) => [key, null]))));
  const root = el("div", {class: "tools filters"}, fields.text, el("span", {class: "range"}, "reward ", fields.reward_min, fields.reward_max), el("span", {class: "range"}, "tokens ", fields.length_min, fields.length_max), changing, clear);
  function write(query, body) {
    for (const [key, field] of Object.entries(fields)) if (document.activeElement !== field) field.value = query[key] || "";
    const pick = (label, key, options) => (options.length ? choice(label, [["", `any ${label}`], ...options], query[key] || "", (value) => set({[key]: value || null, first: null})) : null);
    changing.replaceChildren(...[pick("stop", "stop", body.stops.map((each) => [each, each])), pick("tag", "tag", body.tags.map((each) => [each, each])),
      choice("trained on or discarded", [["", "all"], ["trained", "trained on"], ["discarded", "discarded"]], query.kept || "", (value) => set({kept: value || null, first: null})),
      button("with errors", () => set({errors: query.errors === "1" ? null : 1, first: null}), {"aria-pressed": String(query.errors === "1"), title: "only those with a failed tool call or that could not be graded"}),
      query.problem ? button(`problem ${shortened(query.problem, 30)} ×`, () => set({problem: null, first: null}), {"aria-label": "any problem"}) : null,
      query.group !== undefined ? button(`group ${query.group} ×`, () => set({group: null, first: null}), {"aria-label": "any group"}) : null].filter(Boolean));
    clear.hidden = !FILTERS.some((key) => query[key] !== undefined);
  }
  return {root, write};
}

function heading(key, words, query, set, css) {
  const on = (query.sort || "index") === key, down = query.down === "1";
  return el("th", {scope: "col", class: css, "aria-sort": on ? (down ? "descending" : "ascending") : null},
    button(`${words}${on ? (down ? " ↓" : " ↑") : ""}`, () => set({sort: key === "index" ? null : key, down: on ? (down ? null : 1) : key === "index" ? null : 1, first: null}), {class: "bare", title: `sort by ${SORTS[key]}`}));
}

function ended(row) {
  const words = [row.stop_reason, row.ended && row.ended !== "done" && row.ended !== row.stop_reason ? row.ended : null].filter(Boolean).join(", ");
  return [words || NOTHING, row.discarded ? el("span", {class: "pill", title: `discarded: ${row.discarded}`}, `✂ ${row.discarded}`) : null, row.error ? el("span", {class: "pill failed", title: row.error}, shortened(row.error, 26)) : null,
    row.tool_errors ? el("span", {class: "pill failed"}, plural(row.tool_errors, "tool error")) : null];
}

// The table of rollouts; href(index) is where a row leads.
export function table(rows, query, {set, href, index}) {
  const turns = rows.some((row) => row.turns > 1);
  return el("div", {class: "scroll"}, el("table", {class: "tight wide samples"},
    el("thead", null, el("tr", null, heading("index", "rollout", query, set, ""), heading("reward", "reward", query, set, "number"), heading("advantage", "advantage", query, set, "number"), heading("length", "tokens", query, set, "number"),
      turns ? heading("turns", "turns", query, set, "number") : null, heading("errors", "ended", query, set, ""), el("th", {scope: "col"}, "text"))),
    el("tbody", null, rows.map((row) => el("tr", {class: row.index === index ? "on" : "", "data-index": row.index, "aria-current": row.index === index ? "true" : null},
      el("th", {scope: "row"}, el("a", {class: "quiet", href: href(row.index)}, el("span", {class: "called"}, shortName(row.problem_id ?? row.group, 24)), el("span", {class: "muted"}, ` · ${row.sample}`))),
      el("td", {class: "number"}, el("span", {class: row.reward === null ? "muted" : row.correct ? "good" : "bad", title: row.correct ? "correct" : "not correct"}, row.reward === null ? "?" : `${row.correct ? "✓" : "✗"} ${number(row.reward)}`)),
      el("td", {class: "number"}, number(row.advantage)), el("td", {class: "number"}, String(row.length ?? NOTHING)), turns ? el("td", {class: "number"}, String(row.turns)) : null,
      el("td", {class: "ended"}, ended(row)), el("td", {class: "excerpt"}, el("div", {dir: "auto"}, shortened(String(row.text).replace(/\s+/g, " "), 160))))))));
}
