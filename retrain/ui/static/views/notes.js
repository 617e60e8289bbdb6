// What was noted about the runs, and the log of a run from its end backwards; both with search.

import {get, isAborted} from "../api.js";
import {AddressChoice, AddressSearch, RunChoice} from "../components/inputs.js";
import {Answered, Failed, Title} from "../components/states.js";
import {plural} from "../format.js";
import {step, useKeys} from "../keys.js";
import {link, useAddress} from "../lib/address.js";
import {EVERY_KIND, useAnswer, useChanges, useRuns} from "../lib/answer.js";
import {html, useEffect, useElement, useLayoutEffect, useRef, useState} from "../lib/html.js";
import {Marked} from "./conversation.js";

const LEVELS = [
  ["", "all notes"],
  ["warning", "warnings"],
  ["info", "info"],
];
const COLOURS = {warning: "warn", error: "bad", critical: "bad"};
const MOST_NOTES = 300;
const MOST_LINES = 5000;

export function Notes() {
  useKeys({j: ["next note", () => step("li.note", 1)], k: ["previous note", () => step("li.note", -1)]});
  return html`<${Title} title="Notes and logs" />
    <div class="tools">
      <${AddressSearch} label="search notes and log" /><${AddressChoice} name="level" label="level" options=${LEVELS} />
    </div>
    <section><h2>Notes</h2><${NoteList} /></section>
    <section><h2>Log</h2><${Log} /></section>`;
}

function NoteList() {
  const {place, query} = useAddress();
  const {q: search, level} = query;
  const answer = useAnswer("notes", {at: place, search, level}, {kinds: ["notes"], wait: 3000});
  const nothing = search || level ? "None matches the search." : "Nothing odd was noticed in these runs.";
  const content = ({notes, total}) => {
    const rest = total - MOST_NOTES;
    const item = (note, i) => html`<${Note} key=${i} ...${note} />`;
    if (!notes.length) return html`<p class="muted">${nothing}</p>`;
    return html`<ul class="notes">${notes.slice(0, MOST_NOTES).map(item)}</ul>
      ${rest > 0 && html`<p class="muted">${plural(rest, "further note")}: search for them.</p>`}`;
  };
  return html`<${Answered} of=${answer}>${content}<//>`;
}

function Note({place, run, step: number, level, text, remedy}) {
  return html`<li class=${`note ${level}`} tabindex="-1">
    <div class="head">
      <b class=${level === "warning" ? "warn" : null}>${text}</b>
      <span class="muted small">
        <a href=${link("metrics", place)} class="quiet">${run || place}</a>, step ${number}
      </span>
    </div>
    ${remedy && html`<div class="muted">${remedy}</div>`}
  </li>`;
}

/** @type {{lines: any[], before: number | null, error: any, known: boolean}} */
const NO_LINES = {lines: [], before: null, error: null, known: false};

/** Return the lines of a log from its end; `read(byte)` adds the page before that byte. */
function useLog(at, search) {
  const [log, setLog] = useState(NO_LINES);
  const controller = useRef(new AbortController());
  const read = async (/** @type {number | undefined} */ before = undefined) => {
    const {signal} = controller.current;
    try {
      const body = await get("log", {at, search, before}, signal);
      setLog((old) => {
        const byByte = new Map([...old.lines, ...body.lines].map((line) => [line.byte, line]));
        const lines = [...byByte.values()].sort((a, b) => a.byte - b.byte);
        const isNewest = before === undefined;
        const first = old.known && isNewest ? old.before : body.before;
        return {lines: isNewest ? lines.slice(-MOST_LINES) : lines, before: first, error: null, known: true};
      });
    } catch (error) {
      if (!isAborted(error) && !signal.aborted) setLog((old) => ({...old, error}));
    }
  };
  useEffect(() => {
    controller.current = new AbortController();
    setLog(NO_LINES);
    if (at !== null) read();
    return () => controller.current.abort();
  }, [at, search]);
  useChanges(at === null ? null : EVERY_KIND, read);
  return {...log, read};
}

function Log() {
  const {place, query, patch} = useAddress();
  const {runs, known: isListed, error: failed} = useRuns(place);
  const first = runs.length ? runs[0].place : place;
  const at = query.run || (isListed || failed ? first : null);
  const {lines, before, error, known, read} = useLog(at, query.q);
  const older = html`<button type="button" onClick=${() => read(Number(before))}>Older lines</button>`;
  const content = html`<${LogLines} lines=${lines} search=${query.q} known=${known} />`;
  return html`<div class="tools">
      <${RunChoice} runs=${runs} value=${at} onChoose=${(run) => patch({run})} />
      <span class="muted small">newest lines at the end</span>
    </div>
    <div class="older">${before !== null && older}</div>
    ${error && !known ? html`<${Failed} error=${error} retry=${() => read()} />` : content}`;
}

function LogLines({lines, search, known}) {
  const root = useElement();
  const first = useRef(Infinity);
  // Measured before the new lines are drawn: the end stays in sight, and older lines push nothing away.
  const element = root.current;
  const fromEnd = element ? element.scrollHeight - element.scrollTop : 0;
  const atEnd = !element || fromEnd - element.clientHeight < 30;
  useLayoutEffect(() => {
    const drawn = root.current;
    const start = lines.length ? lines[0].byte : Infinity;
    if (atEnd) drawn.scrollTop = drawn.scrollHeight;
    else if (start < first.current) drawn.scrollTop = drawn.scrollHeight - fromEnd;
    first.current = start;
  }, [lines]);
  const row = ({text, level, byte}) => html`<div key=${byte} class=${COLOURS[(level || "").toLowerCase()]}>
    <${Marked} text=${text} search=${search} />
  </div>`;
  const empty = html`<p class="state">${search ? "No line matches." : "The log is empty."}</p>`;
  return html`<div class="log" ref=${root} tabindex="0" role="log" aria-label="run.log">
    ${lines.length || !known ? lines.map(row) : empty}
  </div>`;
}
