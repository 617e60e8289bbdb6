// @ts-nocheck
// What was said: the prompt's messages, turns, and what tools and environments answered. Texts only, long ones folded.

import {button, el} from "../dom.js";
import {NOTHING, number, plural} from "../format.js";

const LONG = 4000, TOOL = 1200;

function textOf(content) {
  return typeof content === "string" ? content : content === null || content === undefined ? "" : JSON.stringify(content, null, 2);
}

// A text of any length: beyond `most` characters the rest comes on request.
export function longText(text, most = LONG, css = "said") {
  const all = textOf(text), box = el("div", {class: css, dir: "auto"});
  if (all.length <= most * 1.2) { box.append(el("span", null, all)); return box; }
  const rest = all.length - most;
  const more = button(`show ${rest} further characters`, () => { box.replaceChildren(el("span", null, all)); });
  box.append(el("span", null, `${all.slice(0, most)} …`), el("div", null, more));
  return box;
}

export function message({role, content, name, ...more}, css = "") {
  const tool = role === "tool" || role === "environment";
  const extra = Object.entries(more).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return el("div", {class: `message ${css} ${tool ? "tool" : ""}`}, el("div", {class: "role"}, role || "message", name ? ` ${name}` : ""),
    el("div", {class: "body"}, longText(content, tool ? TOOL : LONG), extra.map(([key, value]) => el("div", {class: "small muted"}, `${key}: ${textOf(value)}`.slice(0, 2000)))));
}

function pairs(values) {
  return Object.entries(values || {}).filter(([, value]) => value !== null && value !== undefined)
    .map(([key, value]) => `${key} ${typeof value === "number" ? number(value) : textOf(value).slice(0, 300)}`);
}

function turnHead(turn, k, turns, advantage) {
  const parts = [turns > 1 ? `turn ${k + 1}` : "answer", plural(turn.tokens ?? 0, "token"), turn.stop_reason && turn.stop_reason !== "stop" ? `ended: ${turn.stop_reason}` : null,
    turn.reward === null || turn.reward === undefined ? null : `reward ${number(turn.reward)}`, advantage === null || advantage === undefined ? null : `advantage ${number(advantage)}`, ...pairs(turn.metrics)];
  return el("div", {class: "role"}, parts.filter(Boolean).join(" · "));
}

// The prompt of an answer of /api/rollout or of a side of /api/prompt.
export function promptOf({messages, reference}) {
  return el("div", {class: "promptbox"}, messages && messages.length ? messages.map((each) => message(each)) : el("p", {class: "muted small"}, "The prompt is not recorded for this step."),
    reference === null || reference === undefined || reference === "" ? null : el("div", {class: "message"}, el("div", {class: "role"}, "reference"), el("div", {class: "body"}, longText(reference))));
}

// The turns; body(turn, k) gives what stands for a turn's text, such as its tokens.
export function turnsOf(line, body) {
  const {turns} = line;
  return turns.map((turn, k) => [
    turn.fresh ? el("p", {class: "muted small"}, "The conversation was written anew before this turn:") : null,
    (turn.messages || []).map((each) => message(each)),
    el("div", {class: "message answer"}, turnHead(turn, k, turns.length, (line.turn_advantages || [])[k]),
      el("div", {class: "body"}, body ? body(turn, k) : turn.text === "" ? el("p", {class: "muted"}, "(an empty text)") : longText(turn.text),
        Object.keys(turn.logs || {}).length ? el("details", {class: "small"}, el("summary", {class: "muted"}, "logs of this turn"), el("div", {class: "said"}, JSON.stringify(turn.logs, null, 1).slice(0, 20000))) : null))]);
}

// Reward, advantage and how it ended, in one row; what is wrong comes in words.
export function outcome(line) {
  const total = line.turns.reduce((sum, turn) => sum + (turn.tokens || 0), 0);
  const fact = (name, value) => el("div", null, el("dt", null, name), el("dd", null, value));
  return el("dl", {class: "facts outcome"}, fact("reward", line.reward === null ? NOTHING : number(line.reward)), fact("correct", line.correct ? "✓ yes" : "✗ no"),
    line.advantage === null || line.advantage === undefined ? null : fact("advantage", number(line.advantage)), fact("tokens", String(total)),
    line.turns.length > 1 ? fact("turns", String(line.turns.length)) : null, fact("ended", [line.stop_reason, line.ended].filter((each, i, all) => each && all.indexOf(each) === i).join(", ") || NOTHING),
    line.discarded ? fact("discarded", line.discarded) : null, line.error ? fact("error", el("span", {class: "bad"}, line.error)) : null,
    line.tool_errors ? fact("tool errors", String(line.tool_errors)) : null, line.age ? fact("age", plural(line.age, "version")) : null,
    pairs(line.metrics).map((text) => { const [key, ...value] = text.split(" "); return ["correct", "reward"].includes(key) ? null : fact(key, value.join(" ")); }));
}

// The samples of a group as buttons with their rewards: ✓ right, ✗ wrong, ? not graded.
export function strip(samples, chosen, pick, title) {
  return el("span", {class: "strip", role: "group", "aria-label": title}, samples.map((each, k) => {
    const sign = each.reward === null ? "?" : each.correct ? "✓" : "✗";
    const words = [`sample ${each.sample ?? k}`, `reward ${each.reward === null ? "none" : number(each.reward)}`, each.correct ? "correct" : "not correct",
      each.advantage === null || each.advantage === undefined ? null : `advantage ${number(each.advantage)}`, each.length ? plural(each.length, "token") : null].filter(Boolean).join(", ");
    return button(sign, () => pick(each.index), {class: `bead ${each.reward === null ? "none" : each.correct ? "right" : "false"}`, title: words, "aria-label": words,
      "aria-pressed": String(each.index === chosen)});
  }));
}
