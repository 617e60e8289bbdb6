// What was noted about the runs, and the log of a run from its end backwards; both with search.

import {AddressChoice, AddressSearch, RunChoice, button} from "../components/inputs.js";
import {Answered, Title} from "../components/states.js";
import {isCopy} from "../copy.js";
import {plural} from "../format.js";
import {step, useKeys} from "../keys.js";
import {link, useAddress} from "../lib/address.js";
import {EVERY_KIND, useAnswer, useRuns} from "../lib/answer.js";
import {html, useElement, useLayoutEffect} from "../lib/html.js";
import {Marked} from "./conversation.js";

const LEVELS = Object.entries({"": "all notes", warning: "warnings", info: "info"});
const COLOURS = {warning: "warn", error: "bad", critical: "bad"};
const MOST_NOTES = 300;
const NEWEST = {before: null};

export function Notes() {
  useKeys({j: ["next note", () => step("li.note", 1)], k: ["previous note", () => step("li.note", -1)]});
  return html`<${Title} title="Notes and logs" />
    <div class="tools">
      <${AddressSearch} label="search notes and log" resets=${NEWEST} />
      <${AddressChoice} name="level" label="level" options=${LEVELS} />
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

function Log() {
  const {place, query, patch} = useAddress();
  const {runs, known, error} = useRuns(place);
  const first = runs.length ? runs[0].place : place;
  const at = query.run || (known || error ? first : null);
  const {q: search, before} = query;
  const answer = useAnswer("log", at && {at, search, before}, {kinds: before ? null : EVERY_KIND});
  const older = isCopy() || !answer.data ? null : answer.data.before; // a copy has the newest lines alone
  const linesBefore = (text, to) => button(text, () => patch({before: to}));
  return html`<div class="tools">
      <${RunChoice} runs=${runs} run=${at} resets=${NEWEST} />
      <span class="muted small">newest lines at the end</span>
      ${before && linesBefore("Newest lines", null)}${older !== null && linesBefore("Older lines", older)}
    </div>
    <${Answered} of=${answer}>${({lines}) => html`<${LogLines} lines=${lines} search=${search} />`}<//>`;
}

function LogLines({lines, search}) {
  const root = useElement();
  // Measured before the new lines are drawn: the end stays in sight.
  const {scrollHeight = 0, scrollTop = 0, clientHeight = 0} = root.current || {};
  const isAtEnd = scrollHeight - scrollTop - clientHeight < 30;
  useLayoutEffect(() => {
    if (isAtEnd) root.current.scrollTop = root.current.scrollHeight;
  }, [lines]);
  const row = ({text, level, byte}) => html`<div key=${byte} class=${COLOURS[(level || "").toLowerCase()]}>
    <${Marked} text=${text} search=${search} />
  </div>`;
  const empty = html`<p class="state">${search ? "No line matches." : "The log is empty."}</p>`;
  return html`<div class="log" ref=${root} tabindex="0" role="log" aria-label="run.log">
    ${lines.length ? lines.map(row) : empty}
  </div>`;
}
