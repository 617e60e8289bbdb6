// Runs of several campaigns and tools on one chart: coloured by a key of their configuration, a mean for each group.

import {conditionLines, countsOf} from "../charts/curve_lines.js";
import {Chart} from "../components/chart.js";
import {AddressTick, AxisChoice, MetricChoice, SmoothingChoice, WholeRange} from "../components/curve_controls.js";
import {smoothOf, useHidden, zoomOf, zoomTo} from "../components/curve_controls.js";
import {Choice, SignButton} from "../components/inputs.js";
import {Condition, Legend} from "../components/marks.js";
import {Table} from "../components/table.js";
import {useAddress} from "../lib/address.js";
import {useAnswer} from "../lib/answer.js";
import {useCurves} from "../lib/curves.js";
import {groupKeys, namedGroups, shownValue} from "../lib/groups.js";
import {html, useMemo} from "../lib/html.js";
import {USUAL, levelWords} from "./campaign_curves.js";
import {KEY_COLUMN, Value} from "./compare_pair.js";
import {PlaceField, usePlaces} from "./compare_places.js";

// Places in the address: each encoded, so that a comma may stand in a name.
function placesOf(query) {
  return (query.with || "").split(",").filter(Boolean).map(decodeURIComponent);
}

function withPlaces(places) {
  return {with: places.map(encodeURIComponent).join(",") || null, zoom: null};
}

export function Groups() {
  const {place, query, patch} = useAddress();
  const others = placesOf(query);
  const at = [place, ...others.filter((each) => each !== place)];
  const {data: metrics} = useAnswer("metrics", {at}, {kinds: ["metrics", "evals"], wait: 4000});
  const zoom = useMemo(() => zoomOf(query.zoom), [query.zoom]);
  const watched = metrics ? metrics.watch : [];
  const metric = query.key || watched[0] || null;
  const by = query.by || "";
  const groupBy = groupKeys(by, query.alone === "1");
  const smooth = smoothOf(query.smooth, USUAL[0]);
  const question = {at, key: metric, x: query.x || "step", smooth, group_by: groupBy};
  const {body, error, retry} = useCurves("curves", question, zoom, metric !== null);
  const drawn = useMemo(() => body && {...body, conditions: namedGroups(body.conditions, by)}, [body, by]);
  const rest = metrics ? metrics.metrics.map((each) => each.key).filter((key) => !watched.includes(key)) : [];
  const choose = (key) => patch({key});
  return html`<${Places} at=${at} others=${others} />
    <div class="tools">
      <${MetricChoice} metric=${metric} watched=${watched} rest=${rest} onChoose=${choose} />
      <${Settings} keys=${(body && body.keys) || []} />
    </div>
    <${GroupChart} body=${drawn} metric=${metric} error=${error} retry=${retry} zoom=${zoom} />
    ${drawn && html`<${Differ} groups=${drawn.conditions} rows=${drawn.differ || []} />`}`;
}

/** @param {{at: string[], others: string[]}} props */
function Places({at, others}) {
  const {patch} = useAddress();
  const options = usePlaces();
  const drop = (place) => patch(withPlaces(others.filter((each) => each !== place)));
  const add = (place) => place && !at.includes(place) && patch(withPlaces([...others, place]));
  const chip = (place) =>
    html`<li key=${place}>
      <code>${place}</code>
      ${
        others.includes(place) &&
        html`<${SignButton} label=${`leave out ${place}`} onPress=${() => drop(place)}>×<//>`
      }
    </li>`;
  return html`<div class="tools">
    <ul class="places" aria-label="compared">
      ${at.map(chip)}
    </ul>
    <${PlaceField} label="add a campaign or a run" value="" options=${options} onChoose=${add} key=${at.length} />
  </div>`;
}

/** @param {{keys: string[]}} props */
function Settings({keys}) {
  const {query, patch} = useAddress();
  const by = query.by || "";
  const known = [...new Set([...(by ? [by] : []), ...keys])];
  const colours = [["", "a colour for each group"], ...known.map((key) => [key, `colour by ${key}`])];
  const colour = (key) => patch({by: key || null});
  const alone = "one mean for each value of the key, over all runs that have it";
  return html`<${AxisChoice} /><${SmoothingChoice} usual=${USUAL} />
    <${Choice} label="colour" options=${colours} value=${by} onChoose=${colour} />
    ${by && html`<${AddressTick} name="alone" title=${alone}>group by it alone<//>`}
    <${AddressTick} name="thin">every run<//><${AddressTick} name="logx">log x<//>
    <${AddressTick} name="logy">log y<//><${WholeRange} />`;
}

/**
 * @param {{body: any, metric: string | null, error: any, retry: () => void, zoom: number[] | null}} props
 */
function GroupChart({body, metric, error, retry, zoom}) {
  const {query, patch} = useAddress();
  const {hidden, toggle} = useHidden(",");
  const thin = query.thin === "1";
  const [lines, counts] = useMemo(() => {
    if (!body) return [null, null];
    const conditions = body.conditions.filter(({index}) => !hidden.has(String(index)));
    return [conditionLines({...body, conditions}, thin), countsOf(conditions)];
  }, [body, thin, hidden]);
  const entry = ({label, index, runs, places}) => {
    return {name: `${label} (${runs.length})`, index, hidden: hidden.has(String(index)), hint: places.join(", ")};
  };
  const entries = body ? body.conditions.map(entry) : [];
  return html`<${Legend} groups=${entries} onToggle=${({index}) => toggle(String(index))} />
    <${Chart}
      title=${body ? body.key : metric || ""}
      words=${body && levelWords(body, counts !== null)}
      level="h2"
      lines=${lines}
      x=${(body && body.x) || "step"}
      height=${420}
      group="compare"
      share=${body && body.share}
      unit=${body && body.share ? "%" : ""}
      logX=${query.logx === "1"}
      logY=${query.logy === "1"}
      counts=${counts}
      zoom=${zoom}
      onZoom=${(range) => patch(zoomTo(range), {replace: true})}
      error=${error}
      retry=${retry}
    />`;
}

/**
 * In what the groups' configurations differ; seeds are left out.
 * @param {{groups: any[], rows: {key: string, values: any[][]}[]}} props
 */
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
  const table = html`<${Table}
    class="tight diff"
    label="differences"
    columns=${columns}
    rows=${ordered}
    keyOf=${(row) => row.key}
    region=${true}
  />`;
  return html`<section>
    <h2>Differences between the groups <small>configuration, without seeds</small></h2>
    ${rows.length ? table : html`<p class="muted">No key differs between the groups.</p>`}
  </section>`;
}
