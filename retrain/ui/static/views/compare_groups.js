// Runs of several campaigns and tools on one chart: coloured by a key of their configuration, a mean for each group.

import {AS_IN_REPORT, CurveTools, GroupLegend, MetricChoice} from "../components/curve_controls.js";
import {useCurveSettings, useMetric} from "../components/curve_controls.js";
import {AddressChoice, AddressTick, signButton} from "../components/inputs.js";
import {Condition} from "../components/marks.js";
import {Table} from "../components/table.js";
import {useAddress} from "../lib/address.js";
import {useCurves} from "../lib/answer.js";
import {groupKeys, namedGroups, shownValue} from "../lib/groups.js";
import {html, useMemo} from "../lib/html.js";
import {ConditionChart} from "./campaign_curves.js";
import {KEY_COLUMN, PlaceField, Value} from "./compare_pair.js";

const ALONE = "one mean for each value of the key, over all runs that have it";

export function Groups() {
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
  const entry = ({label, index, runs, places}) => ({
    name: `${label} (${runs.length})`,
    index,
    hint: places.join(", "),
  });
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

// In what the groups' configurations differ; seeds are left out.
function Differ({groups, rows}) {
  const isSet = (values) => values.some((value) => value !== null);
  // Keys that most groups have come first: those of one tool alone tell little.
  const count = ({values}) => values.filter(isSet).length;
  const ordered = [...rows].sort((a, b) => count(b) - count(a));
  const column = ({label, index}, i) => ({
    key: String(index),
    title: html`<${Condition} index=${index}>${label}<//>`,
    cell: ({values}) => (isSet(values[i]) ? values[i].map(shownValue).join(", ") : html`<${Value} value=${null} />`),
  });
  const columns = [KEY_COLUMN, ...groups.map(column)];
  const table = {
    class: "tight diff",
    label: "differences",
    columns,
    rows: ordered,
    keyOf: (row) => row.key,
    region: true,
  };
  return html`<section>
    <h2>Differences between the groups <small>configuration, without seeds</small></h2>
    ${rows.length ? html`<${Table} ...${table} />` : html`<p class="muted">No key differs between the groups.</p>`}
  </section>`;
}
