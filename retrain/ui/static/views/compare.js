// Any campaigns or runs beside each other: their curves on one chart, coloured by a key of their configuration, with a
// mean for each group; or in what two of them differ.

import {COLOURS} from "../colours.js";
import {AS_IN_REPORT, CurveTools, GroupLegend, MetricChoice} from "../components/curve_controls.js";
import {useCurveSettings, useMetric} from "../components/curve_controls.js";
import {AddressChoice, AddressTick, Field, Tabs, signButton} from "../components/inputs.js";
import {Condition} from "../components/marks.js";
import {Answered, Empty, Title} from "../components/states.js";
import {Table} from "../components/table.js";
import {plural} from "../format.js";
import {useAddress} from "../lib/address.js";
import {EVERY_KIND, useAnswer, useCurves, useRuns} from "../lib/answer.js";
import {html, useEffect, useMemo} from "../lib/html.js";
import {nameOf} from "../names.js";
import {ConditionChart} from "./campaign_curves.js";

const ALONE = "one mean for each value of the key, over all runs that have it";

const TABS = Object.entries({curves: "Curves of groups", pair: "Two runs, in detail"});

export function Compare() {
  const {query, patch} = useAddress();
  const isPair = (query.tab || (query.b ? "pair" : "curves")) === "pair";
  const words = isPair ? "in what two campaigns or runs differ" : "runs of any campaigns and tools on one chart";
  const choose = (tab) => patch({tab, ...(tab === "pair" ? {} : {a: null, b: null})});
  return html`<${Title} title="Compare" words=${words}>
      <${Tabs} label="what to compare" options=${TABS} value=${isPair ? "pair" : "curves"} onChoose=${choose} />
    <//>
    <${isPair ? Pair : Groups} />`;
}

function Groups() {
  const {place, query} = useAddress();
  // Each place is encoded in the address, so that a comma may stand in a name.
  const others = (query.with || "").split(",").filter(Boolean).map(decodeURIComponent);
  const at = [place, ...others.filter((each) => each !== place)];
  const of = useMetric(at);
  const settings = useCurveSettings(AS_IN_REPORT);
  const {x, smooth, zoom, hidden} = settings;
  const by = query.by || "";
  const question = {at, key: of.metric, x, smooth, group_by: groupKeys(by, query.alone === "1")};
  const {body: answer, error, retry} = useCurves("curves", question, zoom, of.metric !== null);
  const body = useMemo(() => answer && {...answer, conditions: namedGroups(answer.conditions, by)}, [answer, by]);
  const keys = [...new Set([by, ...((body && body.keys) || [])])].filter(Boolean);
  const colours = [["", "a colour for each group"], ...keys.map((key) => [key, `colour by ${key}`])];
  const entry = ({label, index, runs, places}) => {
    return {name: `${label} (${runs.length})`, index, hint: places.join(", ")};
  };
  const chart = {body, metric: of.metric, settings, error, retry, level: "h2", height: 420, group: "compare"};
  return html`<${Places} at=${at} others=${others} />
    <div class="tools">
      <${MetricChoice} of=${of} />
      <${CurveTools} usual=${AS_IN_REPORT} thin="every run">
        <${AddressChoice} name="by" label="colour" options=${colours} />
        ${by && html`<${AddressTick} name="alone" title=${ALONE}>group by it alone<//>`}
      <//>
    </div>
    <${GroupLegend} groups=${body ? body.conditions.map(entry) : []} hidden=${hidden} />
    <${ConditionChart} ...${chart} />
    ${body && html`<${Differ} groups=${body.conditions} rows=${body.differ || []} />`}`;
}

function Places({at, others}) {
  const {patch} = useAddress();
  const set = (places) => patch({with: places.map(encodeURIComponent).join(",") || null, zoom: null});
  const drop = (place) => () => set(others.filter((each) => each !== place));
  const add = (place) => place && !at.includes(place) && set([...others, place]);
  const chip = (place) => html`<li key=${place}>
    <code>${place}</code>
    ${others.includes(place) && signButton("×", `leave out ${place}`, drop(place))}
  </li>`;
  return html`<div class="tools">
    <ul class="places" aria-label="compared">${at.map(chip)}</ul>
    <${PlaceField} label="add a campaign or a run" value="" onChoose=${add} key=${at.length} />
  </div>`;
}

function Differ({groups, rows}) {
  const isSet = (values) => values.some((value) => value !== null);
  // Keys that most groups have come first: those of one tool alone tell little.
  const count = ({values}) => values.filter(isSet).length;
  const ordered = [...rows].sort((a, b) => count(b) - count(a));
  const column = ({label, index}, i) => ({
    key: String(index),
    title: html`<${Condition} index=${index} label=${label} />`,
    cell: ({values}) => (isSet(values[i]) ? values[i].map(shownValue).join(", ") : valueText(null)),
  });
  const columns = [KEY_COLUMN, ...groups.map(column)];
  const table = html`<${Table} ...${DIFF} label="differences" columns=${columns} rows=${ordered} region=${true} />`;
  return html`<section>
    <h2>Differences between the groups <small>configuration, without seeds</small></h2>
    ${rows.length ? table : html`<p class="muted">No key differs between the groups.</p>`}
  </section>`;
}

const OPEN_LINES = 80;
const UNSET = "not set";
const SIDES = /** @type {const} */ (["a", "b"]);

const DIFF = {class: "tight diff", keyOf: (row) => row.key};
const KEY_COLUMN = {key: "key", title: "key", head: true, cell: ({key}) => html`<code>${key}</code>`};

// A field that offers these places and those of all campaigns.
function PlaceField({label, value, first = [], onChoose}) {
  const {data} = useAnswer("places", {}, {kinds: ["state"], wait: 5000});
  const options = [...new Set([...first, ...(data ? data.places : []).map((each) => each.place)])];
  const field = {label, value, options, class: "place", placeholder: "a campaign or a run …"};
  return html`<${Field} ...${field} onEnter=${(text) => onChoose(text || null)} />`;
}

function valueText(value) {
  const text = shownValue(value);
  return text === UNSET ? html`<span class="muted">${text}</span>` : text;
}

function Pair() {
  const {place, query, patch} = useAddress();
  const {family: runs} = useRuns(place);
  const other = runs.length > 1 ? runs.find((run) => run.label !== runs[0].label) || runs[1] : null;
  const isChosen = Boolean(query.a || query.b);
  useEffect(() => {
    if (other && !isChosen) patch({a: runs[0].place, b: other.place}, {replace: true});
  }, [other && other.place, isChosen]);
  const {a = place, b = ""} = query;
  const field = (name, label, value) => {
    const options = {label, value, first: runs.map((run) => run.place), onChoose: (text) => patch({[name]: text})};
    return html`<${PlaceField} ...${options} />`;
  };
  const nothing = html`<${Empty} title="Choose the second place">
    Any campaign or run below the given directories: type a part of its name.
  <//>`;
  return html`<div class="tools">
      ${field("a", "first place", a)}<span class="muted">and</span>${field("b", "second place", b)}
    </div>
    ${b ? html`<${Differences} a=${a} b=${b} />` : nothing}`;
}

function Differences({a, b}) {
  const answer = useAnswer("compare", {a, b}, {kinds: EVERY_KIND, wait: 5000});
  return html`<${Answered} of=${answer}>
    ${(body) => {
      const names = [body.a, body.b].map((run, i) => run.run_id || run.place || [a, b][i]);
      const table = (rows, label) => html`<${DifferenceTable} rows=${rows} names=${names} label=${label} />`;
      const section = (title, rows, none) => html`<section>
        <h2>${title} <small>${rows.length > 0 && plural(rows.length, "difference")}</small></h2>
        ${rows.length ? table(rows, title) : html`<p class="muted">${none}</p>`}
      </section>`;
      return html`${body.hashes.length > 0 && html`<${Hashes} rows=${body.hashes} names=${names} />`}
        ${section("Configuration", body.config, "No key differs.")}
        <${Code} part=${body.code} names=${names} />
        ${section("Machine", body.environment, "The same machine, as far as it was recorded.")}
        ${section("Packages", body.packages, "The same packages.")}`;
    }}
  <//>`;
}

function sideColumns(names, cell) {
  return names.map((title, i) => ({key: SIDES[i], title, cell: (row) => cell(row[SIDES[i]])}));
}

function DifferenceTable({rows, names, label}) {
  const columns = [KEY_COLUMN, ...sideColumns(names, valueText)];
  return html`<${Table} ...${DIFF} label=${label} columns=${columns} rows=${rows} />`;
}

function Hashes({rows, names}) {
  const hash = (value) => html`<code title=${value}>${String(value ?? "–").slice(0, 16)}</code>`;
  const word = ({same}) => {
    if (same === null || same === undefined) return html`<span class="muted">unknown</span>`;
    return same ? html`<span class="good">same</span>` : html`<b class="bad">differs</b>`;
  };
  const columns = [
    {key: "name", title: "what", head: true, cell: (row) => row.name},
    {key: "same", title: html`<span class="away">same</span>`, cell: word},
    ...sideColumns(names, hash),
  ];
  const label = "Data and starting point";
  const known = rows.filter((row) => row.a !== null || row.b !== null);
  return html`<section>
    <h2>${label}</h2><${Table} label=${label} columns=${columns} rows=${known} keyOf=${(row) => row.name} />
  </section>`;
}

function Code({part: {facts, same_diff: same, diff, cut}, names}) {
  const words = html`<span class="good">The same code, also in what was not committed.</span>`;
  const tooLong = "These changes are too long to show whole: code.diff in the two directories has them.";
  return html`<section>
    <h2>Code</h2>
    <p>${same && !facts.length ? words : html`<b class="bad">Not the same code.</b>`}</p>
    ${facts.length > 0 && html`<${DifferenceTable} rows=${facts} names=${names} label="Code" />`}
    ${diff.length > 0 && html`<${Patch} lines=${diff} />`}
    ${cut && html`<p class="muted">${tooLong}</p>`}
  </section>`;
}

function kindOf(line) {
  if (/^(\+\+\+|---|diff |index )/.test(line)) return "muted";
  return {"@": "hunk", "+": "plus", "-": "minus"}[line[0]] || null;
}

function Patch({lines}) {
  const row = (line, i) => html`<div key=${i} class=${kindOf(line)}>${line || " "}</div>`;
  return html`<details open=${lines.length < OPEN_LINES}>
    <summary>
      In what the changes that were not committed differ <span class="muted">${plural(lines.length, "line")}</span>
    </summary>
    <pre class="patch" tabindex="0">${lines.map(row)}</pre>
  </details>`;
}

const USUAL = ["campaign", "condition"];

// Runs are grouped by campaign and condition, so that a group differs in its seeds alone; with a key for the colour
// also by it, or by it alone.
function groupKeys(by, isAlone) {
  if (!by) return USUAL;
  return isAlone ? [by] : [by, ...USUAL.filter((key) => key !== by)];
}

function shownValue(value) {
  if (value === null || value === undefined) return UNSET;
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

// Return the groups with the `label` and the `index` that they are drawn with. Names leave out what all groups share.
// With a key for the colour each of its values has one, and the groups that have it differ in dash and shape.
function namedGroups(groups, by) {
  const keys = Object.keys(groups.length ? groups[0].group : {});
  const valuesOf = (key) => [...new Set(groups.map(({group}) => shownValue(group[key])))];
  const telling = keys.filter((key) => valuesOf(key).length > 1);
  const named = telling.length ? telling : keys.slice(-1);
  const campaigns = valuesOf("campaign");
  const isShort = new Set(campaigns.map(nameOf)).size === campaigns.length;
  const text = (group, key) => {
    const value = shownValue(group[key]);
    if (key === "campaign") return isShort ? nameOf(value) : value;
    return key === by && !USUAL.includes(key) ? `${key.slice(key.lastIndexOf(".") + 1)} ${value}` : value;
  };
  const colours = by ? valuesOf(by) : [];
  const uses = Array(COLOURS).fill(0);
  return groups.map((each, i) => {
    const colour = by ? colours.indexOf(shownValue(each.group[by])) % COLOURS : i;
    const index = by ? colour + COLOURS * uses[colour]++ : i;
    const texts = named.map((key) => text(each.group, key));
    return {...each, label: [...new Set(texts)].join(" · "), index};
  });
}
