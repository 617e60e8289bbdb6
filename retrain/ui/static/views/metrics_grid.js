// The charts of the Metrics page: those that are watched, all by section and group, and one's own.

import {signButton} from "../components/inputs.js";
import {Empty} from "../components/states.js";
import {plural} from "../format.js";
import {useAddress} from "../lib/address.js";
import {download, showToast} from "../lib/browser.js";
import {html, useElement} from "../lib/html.js";
import {MetricChart} from "./metric_chart.js";
import {metricOf, readMine, sectionsOf, writeMine} from "./metrics_keys.js";

// What a file of one's own charts may set.
const KEPT = ["keys", "x", "smooth", "lines", "logx", "logy", "clip", "full", "thin"];

export function OpenChart({body, page}) {
  const metric = metricOf(body.metrics, useAddress().query.open);
  return html`<${MetricChart} key=${metric.key} metric=${metric} page=${page} level="h2" big=${true} />`;
}

function Charts({metrics, page, level}) {
  const chart = (metric) => html`<${MetricChart} key=${metric.key} metric=${metric} page=${page} level=${level} />`;
  return html`<div class="charts">${metrics.map(chart)}</div>`;
}

export function WatchedCharts({body, page, test}) {
  const metrics = body.watch.map((key) => metricOf(body.metrics, key)).filter(test);
  if (metrics.length) return html`<${Charts} metrics=${metrics} page=${page} level="h2" />`;
  return html`<${Empty} title="None of the watched metrics is here">All has every key that these runs wrote.<//>`;
}

export function AllCharts({body, page, test}) {
  const sections = sectionsOf(body.metrics.filter(test));
  const words = "The search looks at keys, sections, groups and the names that other tools use.";
  if (!sections.length) return html`<${Empty} title="No metric matches">${words}<//>`;
  const many = (groups) => groups.reduce((sum, [, metrics]) => sum + metrics.length, 0);
  const entry = ([section, groups]) => {
    const go = () => {
      const head = /** @type {HTMLElement} */ (document.getElementById(`section ${section}`));
      head.scrollIntoView();
      head.focus();
    };
    return html`<button type="button" key=${section} onClick=${go}>
      ${section} <small class="muted">${many(groups)}</small>
    </button>`;
  };
  const group = ([name, metrics], at, groups) => html`<div key=${name}>
    ${name && (groups.length > 1 || !metrics[0].definition) && html`<h3 class="group">${name}</h3>`}
    <${Charts} metrics=${metrics} page=${page} level="h3" />
  </div>`;
  const part = ([section, groups]) => html`<section key=${section}>
    <h2 class="section" id=${`section ${section}`} tabindex="-1">
      ${section}<small>${plural(many(groups), "metric")}</small>
    </h2>
    ${groups.map(group)}
  </section>`;
  const index = html`<nav class="sections" aria-label="sections">${sections.map(entry)}</nav>`;
  return html`${sections.length > 1 && index}${sections.map(part)}`;
}

function ItemButtons({items, at}) {
  const {patch} = useAddress();
  const {key} = items[at];
  const without = items.filter((_, i) => i !== at);
  const put = (to, rest) => () => patch({keys: writeMine([...rest.slice(0, to), items[at], ...rest.slice(to)])});
  const remove = () => patch({keys: writeMine(without), tab: "mine"});
  const [isFirst, isLast] = [at === 0, at === items.length - 1];
  return html`${signButton("◂", `move ${key} forward`, put(at - 1, without), {hint: "move forward", disabled: isFirst})}
  ${signButton("▸", `move ${key} back`, put(at + 1, without), {hint: "move back", disabled: isLast})}
  ${signButton("+", `${key} once more`, put(at, items), {hint: "once more, for another filter"})}
  ${signButton("✕", `take ${key} out of Mine`, remove, {hint: "take out"})}`;
}

export function MyCharts({body, page, test}) {
  const {query, patch} = useAddress();
  const items = readMine(query.keys);
  const chart = ({key, only}, at) => {
    const metric = metricOf(body.metrics, key);
    const filter = (text) => patch({keys: writeMine(items.with(at, {key, only: text}))});
    const before = items.slice(0, at).filter((each) => each.key === key).length;
    const options = {metric, page, only, level: "h2", onFilter: filter};
    return (
      test(metric) &&
      html`<${MetricChart}
      key=${`${before} ${key}`}
      ...${options}
      mine=${html`<${ItemButtons} items=${items} at=${at} />`}
    />`
    );
  };
  const nothing = html`<${Empty} title="Nothing chosen yet">
    ☆ on a chart puts it here. The address holds your choice: keep it as a bookmark, or send it.
  <//>`;
  return html`<${FileButtons} />${items.length ? html`<div class="charts">${items.map(chart)}</div>` : nothing}`;
}

// Buttons that save one's own charts as a file, and open such a file.
function FileButtons() {
  const {query, patch} = useAddress();
  const picker = useElement();
  const read = async (event) => {
    try {
      const {charts} = JSON.parse(await event.target.files[0].text());
      const kept = KEPT.map((key) => [key, typeof charts[key] === "string" ? charts[key] : null]);
      patch({...Object.fromEntries(kept), tab: "mine", open: null});
      showToast(plural(readMine(charts.keys).length, "chart"));
    } catch (error) {
      showToast("This is no file of charts");
    }
  };
  const save = () => {
    const charts = Object.fromEntries(KEPT.filter((key) => query[key]).map((key) => [key, query[key]]));
    download("charts.json", new Blob([`${JSON.stringify({charts}, null, 2)}\n`], {type: "application/json"}));
  };
  const file = {type: "file", accept: "application/json,.json", "aria-label": "file of charts", tabindex: "-1"};
  return html`<div class="tools">
    ${query.keys && html`<button type="button" onClick=${save}>Save as a file</button>`}
    <button type="button" onClick=${() => picker.current.click()}>Open a file</button>
    <input ref=${picker} class="away" ...${file} onChange=${read} />
  </div>`;
}
