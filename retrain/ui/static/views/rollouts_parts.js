// Parts of Rollouts: the histogram of rewards to choose from, groups as strips, filters, and the table.

import {Choice, Field, SearchField, Tick} from "../components/inputs.js";
import {DataTable} from "../components/data_table.js";
import {NOTHING, number, plural, shortened} from "../format.js";
import {isCopy} from "../copy.js";
import {useAddress} from "../lib/address.js";
import {html, useState} from "../lib/html.js";
import {Marked, Strip} from "./conversation.js";
import {shortName} from "./reading.js";

export const FILTERS = [
  ...["reward_min", "reward_max", "length_min", "length_max", "group", "problem", "tag", "stop", "kept", "text"],
  "errors",
];
// What is of one step, or of all of them alone.
const STEP = {iteration: null, index: null, group: null, beside: null, sort: null, down: null, first: null};
const WIDE = 560;
const TALL = 96;
const MOST_GROUPS = 120;

/** @typedef {Record<string, string>} Query */
/** @typedef {{ends: number[], counts: number[], at: number[] | null, absent: number}} Histogram */

/**
 * @param {{low: number, high: number, n: number, words: string, x: number, room: number, size: number, isOn: boolean,
 *   isNamed: boolean, onPick: (ends: number[] | null) => void}} props
 */
function RewardBar({low, high, n, words, x, room, size, isOn, isNamed, onPick}) {
  const pick = () => onPick(isOn ? null : [low, high]);
  const press = (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    event.stopPropagation();
    pick();
  };
  const [left, width] = [x + Math.min(2, room * 0.1), Math.max(1, room - Math.min(4, room * 0.2))];
  return html`<g
    class=${`bin ${isOn ? "on" : ""}`}
    role="button"
    tabindex="0"
    aria-pressed=${String(isOn)}
    aria-label=${words}
    onClick=${pick}
    onKeyDown=${press}
  >
    <title>${words}</title>
    <rect class="hit" x=${x} y="0" width=${room} height=${TALL + 18} />
    <rect class="bar" x=${left} y=${TALL + 16 - size} width=${width} height=${size} />
    ${isNamed && html`<text x=${x + room / 2} y=${TALL + 12 - size} text-anchor="middle">${n}</text>`}
  </g>`;
}

/**
 * Return the ticks below the bars: [x, anchor, value].
 * @param {Histogram} histogram
 * @returns {[number, string, number][]}
 */
function rewardTicks({ends, counts, at}, room) {
  if (at && at.length <= 12) return at.map((value, i) => [(i + 0.5) * room, "middle", value]);
  const last = at ? counts.length - 1 : counts.length;
  const anchors = ["start", "middle", "middle", "middle", "end"];
  return anchors.map((anchor, k) => {
    const i = Math.round((k / 4) * last);
    return [Math.min(WIDE, (i + (at ? 0.5 : 0)) * room), anchor, at ? at[i] : ends[i]];
  });
}

/**
 * The rewards of a step: each bar is a button that shows only its rollouts.
 * @param {{histogram: Histogram, chosen: (string | undefined)[], onPick: (ends: number[] | null) => void}} props
 */
export function Rewards({histogram, chosen, onPick}) {
  const {ends, counts, at, absent} = histogram;
  const most = Math.max(1, ...counts);
  const room = WIDE / Math.max(1, counts.length);
  const bar = (n, i) => {
    const [low, high] = at ? [at[i], at[i]] : [ends[i], ends[i + 1]];
    const isOn = Number(chosen[0]) === low && Number(chosen[1]) === high;
    const words = `${plural(n, "rollout")} with reward ${at ? number(low) : `${number(low)} to ${number(high)}`}`;
    const size = n ? Math.max(2, (n / most) * TALL) : 0;
    const place = {low, high, n, words, x: i * room, room, size, isOn, isNamed: counts.length <= 12};
    return html`<${RewardBar} key=${i} ...${place} onPick=${onPick} />`;
  };
  const tick = ([x, anchor, value], i) =>
    html`<text key=${i} x=${x} y=${TALL + 32} text-anchor=${anchor}>${number(value)}</text>`;
  const base = TALL + 16.5;
  const picture = html`<svg
    class="chart"
    viewBox=${`0 0 ${WIDE} ${TALL + 38}`}
    role="group"
    aria-label="histogram of rewards"
  >
    <line class="grid" x1="0" x2=${WIDE} y1=${base} y2=${base} />
    ${counts.map(bar)}${rewardTicks(histogram, room).map(tick)}
  </svg>`;
  const rest = absent ? ` · ${absent} without a reward` : "";
  return html`<div class="rewards">
    <h2>Rewards<small>choose a bar to see only its rollouts${rest}</small></h2>
    ${counts.length ? picture : html`<p class="muted">No rollout of this step has a reward.</p>`}
  </div>`;
}

/**
 * Groups as strips of their samples, the first ones of many; a group's name shows only its rollouts.
 * @param {{groups: any[], group: number | null, index: number | null, onGroup: (group: number | null) => void,
 *   onSample: (index: number) => void}} props
 */
export function Groups({groups, group, index, onGroup, onSample}) {
  const row = (each) => {
    const tags = each.tags.length ? `, ${each.tags.join(", ")}` : "";
    const dropped = each.discarded ? `, discarded: ${each.discarded}` : "";
    const isOn = each.group === group;
    return html`<div class=${`grouprow ${each.discarded ? "dropped" : ""}`} key=${each.group}>
      <button
        type="button"
        class="bare"
        aria-pressed=${String(isOn)}
        title=${`group ${each.group}: ${each.problem_id}${dropped}${tags}`}
        onClick=${() => onGroup(isOn ? null : each.group)}
      >
        ${shortName(each.problem_id ?? each.group, 24)}
      </button>
      <${Strip}
        samples=${each.samples}
        chosen=${index}
        onPick=${onSample}
        label=${`samples of group ${each.group}`}
      />
      ${each.discarded && html`<span class="small muted">${each.discarded}</span>`}
    </div>`;
  };
  const rest = groups.length - MOST_GROUPS;
  const hint = `${plural(groups.length, "group")}: ✓ correct, ✗ not, ? not graded; struck through: discarded`;
  return html`<div class="groupsbox">
    <h2>Groups<small>${hint}</small></h2>
    <div class="groups" tabindex="0" role="region" aria-label="groups">
      ${groups.slice(0, MOST_GROUPS).map(row)}
      ${rest > 0 && html`<p class="small muted">and ${rest} further groups: g goes through all of them</p>`}
    </div>
  </div>`;
}

/**
 * One end of a range; what is no number is marked and not asked for.
 * @param {{label: string, placeholder: string, value: string, onChange: (text: string) => void}} props
 */
function NumberField({onChange, ...field}) {
  const [isWrong, setWrong] = useState(false);
  const enter = (text) => {
    const isNumber = Number.isFinite(Number(text));
    setWrong(!isNumber);
    if (isNumber) onChange(text);
  };
  const looks = {class: "narrow", inputmode: "decimal", wrong: isWrong};
  return html`<${Field} ...${looks} ...${field} wait=${250} onEnter=${enter} />`;
}

/** @param {{body: any}} props the answer of /api/rollouts, null before the first and for all steps */
export function Filters({body}) {
  const {query, patch} = useAddress();
  const change = (key) => (value) => patch({[key]: value || null, first: null}, {replace: true});
  const end = (key, words, hint) => {
    const value = query[key] || "";
    return html`<${NumberField} label=${words} placeholder=${hint} value=${value} onChange=${change(key)} />`;
  };
  const ends = (name, key) =>
    html`<span class="range">
      ${name} ${end(`${key}_min`, `${key} at least`, "from")} ${end(`${key}_max`, `${key} at most`, "to")}
    </span>`;
  const none = Object.fromEntries([...FILTERS, "first"].map((key) => [key, null]));
  const isFiltered = FILTERS.some((key) => query[key] !== undefined);
  return html`<div class="tools filters">
    <${SearchField}
      label="search prompts and answers"
      value=${query.text || ""}
      wait=${250}
      onSearch=${change("text")}
    />
    ${!isCopy() && html`<${AllSteps} />`}
    ${ends("reward", "reward")}${ends("tokens", "length")}
    ${body && html`<${Choices} query=${query} body=${body} set=${patch} />`}
    ${isFiltered && html`<button type="button" onClick=${() => patch(none)}>Clear filters</button>`}
  </div>`;
}

/** Whether all steps are searched, which needs the server. */
function AllSteps() {
  const {query, patch} = useAddress();
  const choose = (all) => patch({...STEP, steps: all ? "all" : null});
  const hint = "of all runs here, in training and in evaluations";
  return html`<${Tick} checked=${query.steps === "all"} title=${hint} onChoose=${choose}>all steps<//>`;
}

/** @param {{query: Query, body: any, set: (changes: Record<string, any>) => void}} props */
function Choices({query, body, set}) {
  const choose = (key) => (value) => set({[key]: value || null, first: null});
  const select = (label, key, any, values) => {
    const options = [["", any], ...values];
    const value = query[key] || "";
    return values.length > 0 && html`<${Choice} ...${{label, options, value}} onChoose=${choose(key)} />`;
  };
  const same = (names) => names.map((name) => [name, name]);
  const kept = [
    ["trained", "trained on"],
    ["discarded", "discarded"],
  ];
  const without = (key, text) =>
    query[key] !== undefined &&
    html`<button type="button" aria-label=${`any ${key}`} onClick=${() => set({[key]: null, first: null})}>
      ${text} ×
    </button>`;
  const isWrong = query.errors === "1";
  return html`${select("stop", "stop", "any stop", same(body.stops))}
    ${select("tag", "tag", "any tag", same(body.tags))}
    ${select("trained on or discarded", "kept", "all", kept)}
    <button
      type="button"
      aria-pressed=${String(isWrong)}
      title="only those with a failed tool call or that could not be graded"
      onClick=${() => set({errors: isWrong ? null : 1, first: null})}
    >
      with errors
    </button>
    ${without("problem", `problem ${shortened(query.problem || "", 30)}`)}${without("group", `group ${query.group}`)}`;
}

/** Why a rollout ended, and what went wrong in it. @param {{row: any}} props */
function Ended({row}) {
  const {stop_reason: stop, ended, discarded, error, tool_errors: errors} = row;
  const words = [stop, ended && ended !== "done" && ended !== stop ? ended : null].filter(Boolean).join(", ");
  const failed = (text, hint) => html`<span class="pill failed" title=${hint}>${text}</span>`;
  return html`${words || NOTHING}
    ${discarded && html`<span class="pill" title=${`discarded: ${discarded}`}>✂ ${discarded}</span>`}
    ${error && failed(shortened(error, 26), error)}${errors > 0 && failed(plural(errors, "tool error"))}`;
}

/**
 * What stands of the text in the table; with a search, around what was found.
 * @param {{row: any, search?: string}} props
 */
function Excerpt({row, search}) {
  const flat = (text) => String(text).replace(/\s+/g, " ");
  const asked =
    row.prompt && html`<div dir="auto"><b>prompt:</b> <${Marked} text=${flat(row.prompt)} search=${search} /></div>`;
  return html`${asked}<div dir="auto"><${Marked} text=${flat(row.text)} search=${search} /></div>`;
}

/**
 * Sorting by these is the server's; `value` says where missing values stand.
 * @param {{turns: boolean, href: (row: any) => string, search?: string}} options
 */
export function columnsOf({turns, href, search}) {
  const name = (row) =>
    html`<a class="quiet" href=${href(row)}
      ><span class="called">${shortName(row.problem_id ?? row.group, 24)}</span
      ><span class="muted"> · ${row.sample}</span></a
    >`;
  const reward = ({reward: value, correct}) => {
    if (value === null) return html`<span class="muted" title="not graded">?</span>`;
    const words = correct ? "correct" : "not correct";
    return html`<span class=${correct ? "good" : "bad"} title=${words}>${correct ? "✓" : "✗"} ${number(value)}</span>`;
  };
  const plain = (key, title) => ({key, title, number: true, value: (row) => row[key]});
  const columns = [
    {key: "index", title: "rollout", value: (row) => row.index, cell: name},
    {...plain("reward", "reward"), cell: reward},
    {...plain("advantage", "advantage"), cell: (row) => number(row.advantage)},
    {...plain("length", "tokens"), cell: (row) => row.length ?? NOTHING},
    turns && {...plain("turns", "turns"), cell: (row) => row.turns},
    {
      ...{key: "errors", title: "ended", value: (row) => row.tool_errors + Number(Boolean(row.error))},
      cell: (row) => html`<${Ended} row=${row} />`,
    },
    {key: "text", title: "text", cell: (row) => html`<${Excerpt} row=${row} search=${search} />`},
  ];
  return /** @type {import("../components/table.js").Column[]} */ (columns.filter(Boolean));
}

/**
 * @param {{rows: any[], query: Query, set: (changes: Record<string, any>) => void, index: number | null,
 *   href: (row: any) => string, onOpen: (index: number) => void}} props
 */
export function Samples({rows, query, set, index, href, onOpen}) {
  const columns = columnsOf({turns: rows.some((row) => row.turns > 1), href, search: query.text});
  const sort = (key, down) => set({sort: key === "index" ? null : key, down: down ? 1 : null, first: null});
  return html`<${DataTable}
    class="tight wide samples"
    label="rollouts"
    columns=${columns}
    rows=${rows}
    keyOf=${(row) => String(row.index)}
    sort=${query.sort || "index"}
    down=${query.down === "1"}
    onSort=${sort}
    onOpen=${(row) => onOpen(row.index)}
    selected=${(row) => row.index === index}
  />`;
}
