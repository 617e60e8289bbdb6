// What was said: the prompt's messages, turns, and what tools and environments answered. Long texts are folded.

import {NOTHING, number, plural} from "../format.js";
import {createContext, html, useContext, useState} from "../lib/html.js";

const LONG = 4000;
const TOOL = 1200;
const MOST_MARKS = 500;

/** What is searched for: every text below marks it. */
export const Search = createContext("");

function textOf(content) {
  if (typeof content === "string") return content;
  return content === null || content === undefined ? "" : JSON.stringify(content, null, 2);
}

/** The text with every place of `search` marked, whatever the case. @param {{text: string, search?: string}} props */
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

/**
 * A text of any length: what lies beyond `most` characters comes on request.
 * @param {{text: any, most?: number, class?: string}} props
 */
export function LongText({text, most = LONG, class: name = "said"}) {
  const [isOpen, setOpen] = useState(false);
  const search = useContext(Search);
  const all = textOf(text);
  const isWhole = isOpen || all.length <= most * 1.2;
  const rest = html`<div>
    <button type="button" onClick=${() => setOpen(true)}>show ${all.length - most} further characters</button>
  </div>`;
  return html`<div class=${name} dir="auto">
    <span><${Marked} text=${isWhole ? all : `${all.slice(0, most)} …`} search=${search} /></span>${!isWhole && rest}
  </div>`;
}

/** @param {{message: any}} props */
function Message({message: {role, content, name, ...more}}) {
  const isTool = role === "tool" || role === "environment";
  const extra = Object.entries(more).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const line = ([key, value]) =>
    html`<div class="small muted" key=${key}>${`${key}: ${textOf(value)}`.slice(0, 2000)}</div>`;
  return html`<div class=${`message ${isTool ? "tool" : ""}`}>
    <div class="role">${role || "message"}${name ? ` ${name}` : ""}</div>
    <div class="body"><${LongText} text=${content} most=${isTool ? TOOL : LONG} />${extra.map(line)}</div>
  </div>`;
}

function pairs(values) {
  const there = Object.entries(values || {}).filter(([, value]) => value !== null && value !== undefined);
  return there.map(([key, value]) => [key, typeof value === "number" ? number(value) : textOf(value).slice(0, 300)]);
}

function isKnown(value) {
  return value !== null && value !== undefined;
}

function turnWords(turn, k, turns, advantage) {
  const parts = [
    turns > 1 ? `turn ${k + 1}` : "answer",
    plural(turn.tokens ?? 0, "token"),
    turn.stop_reason && turn.stop_reason !== "stop" && `ended: ${turn.stop_reason}`,
    isKnown(turn.reward) && `reward ${number(turn.reward)}`,
    isKnown(advantage) && `advantage ${number(advantage)}`,
    ...pairs(turn.metrics).map((pair) => pair.join(" ")),
  ];
  return parts.filter(Boolean).join(" · ");
}

/** The prompt of an answer of /api/rollout or of a side of /api/prompt. @param {{prompt: any}} props */
export function PromptBox({prompt: {messages, reference}}) {
  const none = html`<p class="muted small">The prompt is not recorded for this step.</p>`;
  const expected = html`<div class="message">
    <div class="role">reference</div><div class="body"><${LongText} text=${reference} /></div>
  </div>`;
  return html`<div class="promptbox">
    ${messages && messages.length ? messages.map((each, i) => html`<${Message} key=${i} message=${each} />`) : none}
    ${isKnown(reference) && reference !== "" && expected}
  </div>`;
}

const EMPTY_TEXT = html`<p class="muted">(an empty text)</p>`;

/** @param {{turn: any, k: number, line: any, body?: any}} props */
function Turn({turn, k, line, body}) {
  const logs = Object.keys(turn.logs || {}).length > 0;
  return html`${turn.fresh && html`<p class="muted small">The conversation was written anew before this turn:</p>`}
    ${(turn.messages || []).map((each, i) => html`<${Message} key=${i} message=${each} />`)}
    <div class="message answer">
      <div class="role">${turnWords(turn, k, line.turns.length, (line.turn_advantages || [])[k])}</div>
      <div class="body">
        ${body || (turn.text === "" ? EMPTY_TEXT : html`<${LongText} text=${turn.text} />`)}
        ${logs && html`<${Logs} logs=${turn.logs} />`}
      </div>
    </div>`;
}

/** @param {{logs: any}} props */
function Logs({logs}) {
  return html`<details class="small">
    <summary class="muted">logs of this turn</summary>
    <div class="said">${JSON.stringify(logs, null, 1).slice(0, 20000)}</div>
  </details>`;
}

/**
 * The turns of a rollout; `body(turn, k)` gives what stands for a turn's text, such as its tokens.
 * @param {{line: any, body?: (turn: any, k: number) => any}} props
 */
export function Turns({line, body}) {
  return line.turns.map(
    (turn, k) => html`<${Turn} key=${k} turn=${turn} k=${k} line=${line} body=${body && body(turn, k)} />`,
  );
}

/** Reward, advantage and how a rollout ended, in one row. @param {{line: any}} props */
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

/**
 * The samples of a group as buttons with their rewards: ✓ correct, ✗ not, ? not graded.
 * @param {{samples: any[], chosen: number | null, onPick: (index: number) => void, label: string}} props
 */
export function Strip({samples, chosen, onPick, label}) {
  const bead = (each, k) => {
    const isGraded = each.reward !== null;
    const words = [
      `sample ${each.sample ?? k}`,
      `reward ${isGraded ? number(each.reward) : "none"}`,
      each.correct ? "correct" : "not correct",
      isKnown(each.advantage) && `advantage ${number(each.advantage)}`,
      each.length && plural(each.length, "token"),
    ];
    const text = words.filter(Boolean).join(", ");
    return html`<button
      type="button"
      key=${each.index}
      class=${`bead ${isGraded ? (each.correct ? "right" : "false") : "none"}`}
      title=${text}
      aria-label=${text}
      aria-pressed=${String(each.index === chosen)}
      onClick=${() => onPick(each.index)}
    >
      ${isGraded ? (each.correct ? "✓" : "✗") : "?"}
    </button>`;
  };
  return html`<span class="strip" role="group" aria-label=${label}>${samples.map(bead)}</span>`;
}
