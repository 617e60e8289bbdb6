// In what two campaigns or runs differ: configuration, code, environment, data and initial adapter.

import {Answered, Empty} from "../components/states.js";
import {Table} from "../components/table.js";
import {plural} from "../format.js";
import {useAddress} from "../lib/address.js";
import {useAnswer} from "../lib/answer.js";
import {shownValue} from "../lib/groups.js";
import {html, useEffect} from "../lib/html.js";
import {EVERY_KIND} from "../lib/live.js";
import {useRuns} from "../lib/campaign.js";
import {PlaceField, usePlaces} from "./compare_places.js";

const MOST_LINES = 3000;
const OPEN_LINES = 80;

export function Pair() {
  const {place, query, patch} = useAddress();
  const {family: runs} = useRuns(place);
  const other = runs.length > 1 ? runs.find((run) => run.label !== runs[0].label) || runs[1] : null;
  const isChosen = Boolean(query.a || query.b);
  useEffect(() => {
    if (other && !isChosen) patch({a: runs[0].place, b: other.place}, {replace: true});
  }, [other && other.place, isChosen]);
  const a = query.a || place;
  const b = query.b || "";
  const options = usePlaces(runs.map((run) => run.place));
  const field = (name, label, value) => {
    const choose = (text) => patch({[name]: text});
    return html`<${PlaceField} label=${label} value=${value} options=${options} onChoose=${choose} />`;
  };
  const nothing = html`<${Empty} title="Choose the second place">
    Any campaign or run below the given directories: type a part of its name.
  <//>`;
  return html`<div class="tools">
      ${field("a", "first place", a)}<span class="muted">and</span>${field("b", "second place", b)}
    </div>
    ${b ? html`<${Differences} a=${a} b=${b} />` : nothing}`;
}

/** @param {{a: string, b: string}} props */
function Differences({a, b}) {
  const answer = useAnswer("compare", {a, b}, {kinds: EVERY_KIND, wait: 5000});
  return html`<${Answered} of=${answer}>
    ${(body) => {
      const names = [body.a, body.b].map((run, i) => run.run_id || run.place || [a, b][i]);
      const section = (title, rows, none) =>
        html`<${Section} title=${title} rows=${rows || []} names=${names} none=${none} />`;
      return html`<${Hashes} rows=${body.hashes || []} names=${names} />
        ${section("Configuration", body.config, "No key differs.")}
        ${body.code && html`<${Code} part=${body.code} names=${names} />`}
        ${section("Machine", body.environment, "The same machine, as far as it was recorded.")}
        ${section("Packages", body.packages, "The same packages.")}`;
    }}
  <//>`;
}

/** @typedef {{key: string, a: any, b: any}} Row */

/** @param {{value: any}} props */
export function Value({value}) {
  const isSet = value !== null && value !== undefined;
  return isSet ? shownValue(value) : html`<span class="muted">${shownValue(value)}</span>`;
}

export const KEY_COLUMN = {key: "key", title: "key", head: true, cell: ({key}) => html`<code>${key}</code>`};

/** @param {{rows: Row[], names: string[], label: string}} props */
function DifferenceTable({rows, names, label}) {
  const column = (name, i) => ({key: "ab"[i], title: name, cell: (row) => html`<${Value} value=${row["ab"[i]]} />`});
  const columns = [KEY_COLUMN, ...names.map(column)];
  return html`<${Table} class="tight diff" label=${label} columns=${columns} rows=${rows} keyOf=${(row) => row.key} />`;
}

/** @param {{title: string, rows: Row[], names: string[], none: string}} props */
function Section({title, rows, names, none}) {
  const table = html`<${DifferenceTable} rows=${rows} names=${names} label=${title} />`;
  return html`<section>
    <h2>${title} <small>${rows.length > 0 && plural(rows.length, "difference")}</small></h2>
    ${rows.length ? table : html`<p class="muted">${none}</p>`}
  </section>`;
}

/** @param {{rows: {name: string, a: any, b: any, same: boolean | null}[], names: string[]}} props */
function Hashes({rows, names}) {
  const known = rows.filter((row) => row.a !== null || row.b !== null);
  if (!rows.length) return null;
  const hash = (value) => html`<code title=${value}>${String(value ?? "–").slice(0, 16)}</code>`;
  const word = ({same}) => {
    if (same === null || same === undefined) return html`<span class="muted">unknown</span>`;
    return same ? html`<span class="good">same</span>` : html`<b class="bad">differs</b>`;
  };
  const columns = [
    {key: "name", title: "what", head: true, cell: (row) => row.name},
    {key: "same", title: html`<span class="away">same</span>`, cell: word},
    ...names.map((name, i) => ({key: "ab"[i], title: name, cell: (row) => hash(row["ab"[i]])})),
  ];
  const title = "Data and starting point";
  return html`<section>
    <h2>${title}</h2>
    <${Table} label=${title} columns=${columns} rows=${known} keyOf=${(row) => row.name} />
  </section>`;
}

/** @param {{part: any, names: string[]}} props */
function Code({part: {facts, same_diff: same, diff, cut}, names}) {
  const words = html`<span class="good">The same code, also in what was not committed.</span>`;
  return html`<section>
    <h2>Code</h2>
    <p>${same && !facts.length ? words : html`<b class="bad">Not the same code.</b>`}</p>
    ${facts.length > 0 && html`<${DifferenceTable} rows=${facts} names=${names} label="Code" />`}
    ${!same && diff && diff.length > 0 && html`<${Patch} lines=${diff} />`}
    ${
      cut &&
      html`<p class="muted">
        These changes are too long to show whole: code.diff in the two directories has them.
      </p>`
    }
  </section>`;
}

function kindOf(line) {
  if (/^(\+\+\+|---|diff |index )/.test(line)) return "muted";
  if (line.startsWith("@@")) return "hunk";
  return line.startsWith("+") ? "plus" : line.startsWith("-") ? "minus" : null;
}

/** @param {{lines: string[]}} props */
function Patch({lines}) {
  const rest = lines.length - MOST_LINES;
  return html`<details open=${lines.length < OPEN_LINES}>
    <summary>
      In what the changes that were not committed differ
      <span class="muted">${plural(lines.length, "line")}</span>
    </summary>
    <pre class="patch" tabindex="0">
      ${lines.slice(0, MOST_LINES).map((line, i) => html`<div key=${i} class=${kindOf(line)}>${line || " "}</div>`)}
      ${rest > 0 && `… ${plural(rest, "further line")}`}
    </pre
    >
  </details>`;
}
