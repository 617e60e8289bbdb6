// What was noted about the runs, and the log of a run from its end backwards; both with search.

import {get, gone} from "../api.js";
import {Choice, SearchField} from "../components/inputs.js";
import {Answered, Failed} from "../components/states.js";
import {plural} from "../format.js";
import {step, useKeys} from "../keys.js";
import {useAddress} from "../lib/address.js";
import {useAnswer} from "../lib/answer.js";
import {useRuns} from "../lib/campaign.js";
import {html, useEffect, useLayoutEffect, useRef, useState} from "../lib/html.js";
import {EVERY_KIND, useChanges} from "../lib/live.js";
import {runName} from "../names.js";
import {link} from "../router.js";
import {Marked} from "./conversation.js";

/** @type {[string, string][]} */
const LEVELS = [
  ["", "all notes"],
  ["warning", "warnings"],
  ["info", "info"],
];
const MOST_NOTES = 300;
const MOST_LINES = 5000;

export function Notes() {
  const {place, query, patch} = useAddress();
  useKeys({j: ["next note", () => step("li.note", 1)], k: ["previous note", () => step("li.note", -1)]});
  return html`<div class="title"><h1>Notes and logs</h1></div>
    <div class="tools">
      <${SearchField}
        label="search notes and log"
        value=${query.q || ""}
        onSearch=${(q) => patch({q: q || null}, {replace: true})}
      />
      <${Choice}
        label="level"
        options=${LEVELS}
        value=${query.level || ""}
        onChoose=${(level) => patch({level: level || null})}
      />
    </div>
    <section><h2>Notes</h2><${NoteList} place=${place} search=${query.q} level=${query.level} /></section>
    <section><h2>Log</h2><${Log} place=${place} search=${query.q} /></section>`;
}

/** @param {{place: string, search?: string, level?: string}} props */
function NoteList({place, search, level}) {
  const answer = useAnswer("notes", {at: place, search, level}, {kinds: ["notes"], wait: 3000});
  return html`<${Answered} of=${answer}>
    ${({notes, total}) => {
      if (!notes.length) {
        const reason = search || level ? "None matches the search." : "Nothing odd was noticed in these runs.";
        return html`<p class="muted">${reason}</p>`;
      }
      const rest = total - MOST_NOTES;
      return html`<ul class="notes">
          ${notes.slice(0, MOST_NOTES).map((note, i) => html`<${Note} key=${i} note=${note} />`)}
        </ul>
        ${rest > 0 && html`<p class="muted">${plural(rest, "further note")}: search for them.</p>`}`;
    }}
  <//>`;
}

/** @param {{note: any}} props */
function Note({note}) {
  return html`<li class=${`note ${note.level}`} tabindex="-1">
    <div class="head">
      <b class=${note.level === "warning" ? "warn" : null}>${note.text}</b>
      <span class="muted small">
        <a href=${link("metrics", note.place)} class="quiet">${note.run || note.place}</a>, step ${note.step}
      </span>
    </div>
    ${note.remedy && html`<div class="muted">${note.remedy}</div>`}
  </li>`;
}

/** @typedef {{text: string, level: string, byte: number}} Line */

/** @type {{lines: Line[], before: number | null, error: any}} */
const NO_LINES = {lines: [], before: null, error: null};

/**
 * The lines of a log from its end; `read(byte)` adds the page before that byte.
 * @param {string | null} at
 */
function useLog(at, search) {
  const [log, setLog] = useState({...NO_LINES, known: false});
  const controller = useRef(new AbortController());
  const read = async (/** @type {number | undefined} */ before = undefined) => {
    const {signal} = controller.current;
    try {
      const body = await get("log", {at, search, before}, signal);
      setLog((old) => {
        const byByte = new Map([...old.lines, ...body.lines].map((line) => [line.byte, line]));
        const lines = [...byByte.values()].sort((a, b) => a.byte - b.byte);
        const kept = before === undefined ? lines.slice(-MOST_LINES) : lines;
        return {
          lines: kept,
          before: old.known && before === undefined ? old.before : body.before,
          error: null,
          known: true,
        };
      });
    } catch (error) {
      if (!gone(error) && !signal.aborted) setLog((old) => ({...old, error}));
    }
  };
  useEffect(() => {
    controller.current = new AbortController();
    setLog({...NO_LINES, known: false});
    if (at !== null) read();
    return () => controller.current.abort();
  }, [at, search]);
  useChanges(at === null ? null : EVERY_KIND, read);
  return {...log, read};
}

/** @param {{place: string, search?: string}} props */
function Log({place, search}) {
  const {query, patch} = useAddress();
  const {runs, known, error: failed} = useRuns(place);
  const first = runs.length ? runs[0].place : place;
  const at = query.run || (known || failed ? first : null);
  const log = useLog(at, search);
  const {lines, before, error, read} = log;
  const options = runs.map((run) => [run.place, `${runName(run)} (${run.state})`]);
  const choose = (run) => patch({run});
  return html`<div class="tools">
      ${runs.length > 1 && html`<${Choice} label="run" options=${options} value=${at} onChoose=${choose} />`}
      <span class="muted small">newest lines at the end</span>
    </div>
    <div class="older">
      ${before !== null && html`<button type="button" onClick=${() => read(before)}>Older lines</button>`}
    </div>
    ${
      error && !log.known
        ? html`<${Failed} error=${error} retry=${() => read()} />`
        : html`<${LogLines} lines=${lines} search=${search} known=${log.known} />`
    }`;
}

/** @param {{lines: Line[], search?: string, known: boolean}} props */
function LogLines({lines, search, known}) {
  const root = useRef(/** @type {HTMLElement | null} */ (null));
  const first = useRef(Infinity);
  // Measured before the new lines are drawn: the end stays in sight, and older lines push nothing away.
  const element = root.current;
  const fromEnd = element ? element.scrollHeight - element.scrollTop : 0;
  const atEnd = !element || fromEnd - element.clientHeight < 30;
  useLayoutEffect(() => {
    const drawn = /** @type {HTMLElement} */ (root.current);
    const start = lines.length ? lines[0].byte : Infinity;
    if (atEnd) drawn.scrollTop = drawn.scrollHeight;
    else if (start < first.current) drawn.scrollTop = drawn.scrollHeight - fromEnd;
    first.current = start;
  }, [lines]);
  const colours = /** @type {Record<string, string>} */ ({warning: "warn", error: "bad", critical: "bad"});
  const row = ({text, level, byte}) => {
    const content = html`<${Marked} text=${text} search=${search} />`;
    return html`<div key=${byte} class=${colours[(level || "").toLowerCase()]}>${content}</div>`;
  };
  const empty = html`<p class="state">${search ? "No line matches." : "The log is empty."}</p>`;
  return html`<div class="log" ref=${root} tabindex="0" role="log" aria-label="run.log">
    ${lines.length || !known ? lines.map(row) : empty}
  </div>`;
}
