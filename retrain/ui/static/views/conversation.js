// What was said: the prompt's messages, turns, and what tools and environments answered. Long texts are folded.

import {button, stateOf} from "../components/inputs.js";
import {NOTHING, number, plural} from "../format.js";
import {createContext, html, useContext, useState} from "../lib/html.js";

const LONG = 4000;
const TOOL = 1200;
const MOST_MARKS = 500;

/** What is searched for: every text below marks it. */
export const Search = createContext("");

function isKnown(value) {
  return value !== null && value !== undefined && value !== "";
}

function textOf(content) {
  if (typeof content === "string") return content;
  return isKnown(content) ? JSON.stringify(content, null, 2) : "";
}

// The text with every place of `search` marked, whatever the case.
export function Marked({text, search}) {
  if (!search) return text;
  const [all, wanted] = [text.toLowerCase(), search.toLowerCase()];
  const parts = [];
  let begin = 0;
  for (let at = all.indexOf(wanted); at >= 0 && parts.length < 2 * MOST_MARKS; at = all.indexOf(wanted, begin)) {
    const end = at + wanted.length;
    parts.push(text.slice(begin, at), html`<mark>${text.slice(at, end)}</mark>`);
    begin = end;
  }
  return [...parts, text.slice(begin)];
}

// A text of any length: what lies beyond `most` characters comes on request.
export function LongText({text, most = LONG, class: name = "said"}) {
  const [isOpen, setOpen] = useState(false);
  const search = useContext(Search);
  const all = textOf(text);
  const isWhole = isOpen || all.length <= most * 1.2;
  const words = `show ${all.length - most} further characters`;
  const rest = html`<div>${button(words, () => setOpen(true))}</div>`;
  return html`<div class=${name} dir="auto">
    <span><${Marked} text=${isWhole ? all : `${all.slice(0, most)} …`} search=${search} /></span>${!isWhole && rest}
  </div>`;
}

function Message({message: {role, content, name, ...more}}) {
  const isTool = role === "tool" || role === "environment";
  const extra = Object.entries(more).filter(([, value]) => isKnown(value));
  const line = ([key, value]) =>
    html`<div class="small muted" key=${key}>${`${key}: ${textOf(value)}`.slice(0, 2000)}</div>`;
  return html`<div class=${`message ${isTool ? "tool" : ""}`}>
    <div class="role">${role || "message"}${name ? ` ${name}` : ""}</div>
    <div class="body"><${LongText} text=${content} most=${isTool ? TOOL : LONG} />${extra.map(line)}</div>
  </div>`;
}

function pairs(values) {
  const there = Object.entries(values || {}).filter(([, value]) => isKnown(value));
  return there.map(([key, value]) => [key, typeof value === "number" ? number(value) : textOf(value).slice(0, 300)]);
}

// The prompt of an answer of /api/rollout or of a side of /api/prompt.
export function PromptBox({prompt: {messages, reference}}) {
  const all = [...(messages || []), ...(isKnown(reference) ? [{role: "reference", content: reference}] : [])];
  const none = html`<p class="muted small">The prompt is not recorded for this step.</p>`;
  return html`<div class="promptbox">
    ${!(messages && messages.length) && none}${all.map((each, i) => html`<${Message} key=${i} message=${each} />`)}
  </div>`;
}

const REWRITTEN = html`<p class="muted small">The conversation was written anew before this turn:</p>`;
export const EMPTY_TEXT = html`<span class="muted">(an empty text)</span>`;

function Turn({turn, k, line, body}) {
  const {fresh, messages, tokens, stop_reason: stop, reward, metrics, text, logs} = turn;
  const advantage = (line.turn_advantages || [])[k];
  const facts = [
    line.turns.length > 1 ? `turn ${k + 1}` : "answer",
    plural(tokens ?? 0, "token"),
    stop && stop !== "stop" && `ended: ${stop}`,
    isKnown(reward) && `reward ${number(reward)}`,
    isKnown(advantage) && `advantage ${number(advantage)}`,
    ...pairs(metrics).map((pair) => pair.join(" ")),
  ];
  const details = html`<details class="small">
    <summary class="muted">logs of this turn</summary>
    <div class="said">${JSON.stringify(logs, null, 1)?.slice(0, 20000)}</div>
  </details>`;
  return html`${fresh && REWRITTEN}${(messages || []).map((each, i) => html`<${Message} key=${i} message=${each} />`)}
    <div class="message answer">
      <div class="role">${facts.filter(Boolean).join(" · ")}</div>
      <div class="body">
        ${body || (text === "" ? EMPTY_TEXT : html`<${LongText} text=${text} />`)}
        ${Object.keys(logs || {}).length > 0 && details}
      </div>
    </div>`;
}

// The turns of a rollout; `body(turn, k)` gives what stands for a turn's text, such as its tokens.
export function Turns({line, body}) {
  return line.turns.map(
    (turn, k) => html`<${Turn} key=${k} turn=${turn} k=${k} line=${line} body=${body && body(turn, k)} />`,
  );
}

// Reward, advantage and how a rollout ended, in one row.
export function Outcome({line}) {
  const total = line.turns.reduce((sum, turn) => sum + (turn.tokens || 0), 0);
  const ends = [...new Set([line.stop_reason, line.ended])].filter(Boolean).join(", ");
  const facts = [
    ["reward", line.reward === null ? NOTHING : number(line.reward)],
    ["correct", line.correct ? "✓ yes" : "✗ no"],
    isKnown(line.advantage) && ["advantage", number(line.advantage)],
    ["tokens", total],
    line.turns.length > 1 && ["turns", line.turns.length],
    ["ended", ends || NOTHING],
    line.discarded && ["discarded", line.discarded],
    line.error && ["error", html`<span class="bad">${line.error}</span>`],
    line.tool_errors && ["tool errors", line.tool_errors],
    line.age && ["age", plural(line.age, "version")],
    ...pairs(line.metrics).filter(([key]) => key !== "correct" && key !== "reward"),
  ];
  return html`<dl class="facts outcome">
    ${facts.filter(Boolean).map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}
  </dl>`;
}

// The samples of a group as buttons with their rewards: ✓ correct, ✗ not, ? not graded.
export function Strip({samples, chosen, onPick, label}) {
  const bead = ({index, sample, reward, correct, advantage, length}, k) => {
    const [css, sign] = reward === null ? ["none", "?"] : correct ? ["right", "✓"] : ["false", "✗"];
    const words = [
      `sample ${sample ?? k}`,
      `reward ${reward === null ? "none" : number(reward)}`,
      correct ? "correct" : "not correct",
      isKnown(advantage) && `advantage ${number(advantage)}`,
      length && plural(length, "token"),
    ];
    const state = stateOf(`bead ${css}`, words.filter(Boolean).join(", "), index === chosen);
    return button(sign, () => onPick(index), {...state, key: index});
  };
  return html`<span class="strip" role="group" aria-label=${label}>${samples.map(bead)}</span>`;
}
