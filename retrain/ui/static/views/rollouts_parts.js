// Parts of Rollouts: the histogram of rewards to choose from, groups as strips, filters, and the table.

import {AddressChoice, AddressField, AddressSearch, AddressTick, button, stateOf} from "../components/inputs.js";
import {Table, numberColumn} from "../components/table.js";
import {NOTHING, number, plural, shortened} from "../format.js";
import {isCopy} from "../copy.js";
import {useAddress} from "../lib/address.js";
import {html} from "../lib/html.js";
import {Marked, Strip} from "./conversation.js";
import {shortName} from "./reading.js";

const FILTERS = [
  ...["reward_min", "reward_max", "length_min", "length_max", "group", "problem", "tag", "stop", "kept", "text"],
  "errors",
];
// What is of one step, or of all of them alone.
const STEP = {iteration: null, index: null, group: null, beside: null, sort: null, down: null, first: null};
const FIRST = {first: null};
const KEPT = Object.entries({"": "all", trained: "trained on", discarded: "discarded"});
const ALL_STEPS = "of all runs here, in training and in evaluations";
const ERRORS = "only those with a failed tool call or that could not be graded";
const TALL = 96;
const NAMED = 12; // So many bars have their numbers
const MOST_GROUPS = 120;

export function filtersOf(query) {
  return Object.fromEntries(FILTERS.map((key) => [key, query[key]]));
}

// The rewards of a step: each bar is a button that shows only its rollouts.
export function Rewards({histogram: {ends, counts, at, absent}}) {
  const {query, patch} = useAddress();
  const most = Math.max(1, ...counts);
  const every = counts.length > NAMED ? Math.ceil(counts.length / 5) : 1;
  const bar = (n, i) => {
    const [low, high] = at ? [at[i], at[i]] : [ends[i], ends[i + 1]];
    const isOn = Number(query.reward_min) === low && Number(query.reward_max) === high;
    const words = `${plural(n, "rollout")} with reward ${at ? number(low) : `${number(low)} to ${number(high)}`}`;
    const pick = () => patch({reward_min: isOn ? null : low, reward_max: isOn ? null : high, first: null});
    const content = html`${every === 1 && n}<i style=${{height: `${n && Math.max(2, (n / most) * TALL)}px`}} />
      <small>${i % every === 0 && number(low)}</small>`;
    return button(content, pick, {...stateOf("bin", words, isOn), key: i});
  };
  const rest = absent ? ` · ${absent} without a reward` : "";
  const bars = html`<div class="bins" role="group" aria-label="histogram of rewards">${counts.map(bar)}</div>`;
  return html`<div>
    <h2>Rewards<small>choose a bar to see only its rollouts${rest}</small></h2>
    ${counts.length ? bars : html`<p class="muted">No rollout of this step has a reward.</p>`}
  </div>`;
}

// Groups as strips of their samples, the first ones of many; a group's name shows only its rollouts.
export function Groups({groups, index, onSample}) {
  const {query, patch} = useAddress();
  const row = ({group, problem_id, tags, discarded, samples}) => {
    const isOn = String(group) === query.group;
    const hint = [`group ${group}: ${problem_id}`, discarded && `discarded: ${discarded}`, ...tags].filter(Boolean);
    const state = {class: "bare", title: hint.join(", "), "aria-pressed": String(isOn)};
    const pick = () => patch({group: isOn ? null : group, first: null});
    return html`<div class=${`grouprow ${discarded ? "dropped" : ""}`} key=${group}>
      ${button(shortName(problem_id ?? group, 24), pick, state)}
      <${Strip} samples=${samples} chosen=${index} onPick=${onSample} label=${`samples of group ${group}`} />
      ${discarded && html`<span class="small muted">${discarded}</span>`}
    </div>`;
  };
  const rest = groups.length - MOST_GROUPS;
  const hint = `${plural(groups.length, "group")}: ✓ correct, ✗ not, ? not graded; struck through: discarded`;
  return html`<div>
    <h2>Groups<small>${hint}</small></h2>
    <div class="groups" tabindex="0" role="region" aria-label="groups">
      ${groups.slice(0, MOST_GROUPS).map(row)}
      ${rest > 0 && html`<p class="small muted">and ${rest} further groups: g goes through all of them</p>`}
    </div>
  </div>`;
}

// `body`: the answer of /api/rollouts, null before the first and for all steps.
export function Filters({body}) {
  const {query, patch} = useAddress();
  const end = (name, label, placeholder) => {
    const field = {name, label, placeholder, type: "number", step: "any", class: "narrow", resets: FIRST};
    return html`<${AddressField} ...${field} />`;
  };
  const ends = (name, key) => html`<span class="range">
    ${name} ${end(`${key}_min`, `${key} at least`, "from")} ${end(`${key}_max`, `${key} at most`, "to")}
  </span>`;
  const choice = (name, label, options) =>
    html`<${AddressChoice} name=${name} label=${label} options=${options} resets=${FIRST} />`;
  const without = (key, text) =>
    query[key] && button(`${text} ×`, () => patch({[key]: null, first: null}), {"aria-label": `any ${key}`});
  const same = (any, names) => [["", any], ...names.map((name) => [name, name])];
  const none = Object.fromEntries([...FILTERS, "first"].map((key) => [key, null]));
  const isFiltered = FILTERS.some((key) => query[key] !== undefined);
  const ofStep = () => html`${choice("stop", "stop", same("any stop", body.stops))}
    ${choice("tag", "tag", same("any tag", body.tags))}${choice("kept", "trained on or discarded", KEPT)}
    <${AddressTick} name="errors" title=${ERRORS} resets=${FIRST}>with errors<//>
    ${without("problem", `problem ${shortened(query.problem || "", 30)}`)}${without("group", `group ${query.group}`)}`;
  return html`<div class="tools filters">
    <${AddressSearch} name="text" label="search prompts and answers" resets=${FIRST} />
    ${!isCopy() && html`<${AddressTick} name="steps" on="all" title=${ALL_STEPS} resets=${STEP}>all steps<//>`}
    ${ends("reward", "reward")}${ends("tokens", "length")}
    ${body && ofStep()}
    ${isFiltered && button("Clear filters", () => patch(none))}
  </div>`;
}

function Ended({row: {stop_reason: stop, ended, discarded, error, tool_errors: errors}}) {
  const words = [stop, ended && ended !== "done" && ended !== stop ? ended : null].filter(Boolean).join(", ");
  const failed = (text, hint = null) => html`<span class="pill failed" title=${hint}>${text}</span>`;
  return html`${words || NOTHING}
    ${discarded && html`<span class="pill" title=${`discarded: ${discarded}`}>✂ ${discarded}</span>`}
    ${error && failed(shortened(error, 26), error)}${errors > 0 && failed(plural(errors, "tool error"))}`;
}

// What stands of the text in the table; with a search, around what was found.
function Excerpt({row: {prompt, text}}) {
  const {query} = useAddress();
  const marked = (words) => html`<${Marked} text=${String(words).replace(/\s+/g, " ")} search=${query.text} />`;
  return html`${prompt && html`<div dir="auto"><b>prompt:</b> ${marked(prompt)}</div>`}
    <div dir="auto">${marked(text)}</div>`;
}

function Reward({row: {reward, correct}}) {
  if (reward === null) return html`<span class="muted" title="not graded">?</span>`;
  const [css, words, sign] = correct ? ["good", "correct", "✓"] : ["bad", "not correct", "✗"];
  return html`<span class=${css} title=${words}>${sign} ${number(reward)}</span>`;
}

// A table of rollouts with further `columns` in front. The server sorts; `value` says by which columns it can.
export function Samples({rows, columns = [], isSortable = true, href, ...table}) {
  const name = (row) => html`<a class="quiet" href=${href(row)}
    ><span class="called">${shortName(row.problem_id ?? row.group, 24)}</span
    ><span class="muted"> · ${row.sample}</span></a
  >`;
  const plain = (key, title, cell) => numberColumn(key, title, cell, {value: (row) => row[key]});
  const errors = (row) => row.tool_errors + Number(Boolean(row.error));
  const all = [
    ...columns,
    {key: "index", title: "rollout", value: isSortable ? (row) => row.index : undefined, cell: name},
    plain("reward", "reward", (row) => html`<${Reward} row=${row} />`),
    plain("advantage", "advantage", (row) => number(row.advantage)),
    plain("length", "tokens", (row) => row.length ?? NOTHING),
    ...(rows.some((row) => row.turns > 1) ? [plain("turns", "turns", (row) => row.turns)] : []),
    {key: "errors", title: "ended", value: errors, cell: (row) => html`<${Ended} row=${row} />`},
    {key: "text", title: "text", cell: (row) => html`<${Excerpt} row=${row} />`},
  ];
  return html`<${Table} class="tight wide samples" columns=${all} rows=${rows} ...${table} />`;
}
