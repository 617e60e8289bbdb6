// The charts of the Metrics page: those that are watched, all by section and group, and one's own.

import {SignButton} from "../components/inputs.js";
import {Empty} from "../components/states.js";
import {plural} from "../format.js";
import {useAddress} from "../lib/address.js";
import {html} from "../lib/html.js";
import {MetricChart} from "./metric_chart.js";
import {FileButtons, metricOf, readMine, sectionsOf, writeMine} from "./metrics_keys.js";

/**
 * @typedef {import("./metrics_keys.js").Metric} Metric
 * @typedef {{body: {metrics: Metric[], watch: string[]}, page: import("./metric_chart.js").Page,
 *   test: (metric: Metric) => boolean}} GridProps
 */

/** @param {Pick<GridProps, "body" | "page">} props */
export function OpenChart({body, page}) {
  const {query} = useAddress();
  const metric = metricOf(body.metrics, query.open);
  return html`<${MetricChart} key=${metric.key} metric=${metric} page=${page} level="h2" big=${true} />`;
}

/** @param {{metrics: Metric[], page: any, level: "h2" | "h3"}} props */
function Charts({metrics, page, level}) {
  const chart = (metric) => html`<${MetricChart} key=${metric.key} metric=${metric} page=${page} level=${level} />`;
  return html`<div class="charts">${metrics.map(chart)}</div>`;
}

/** @param {GridProps} props */
export function WatchedCharts({body, page, test}) {
  const metrics = body.watch.map((key) => metricOf(body.metrics, key)).filter(test);
  if (metrics.length) return html`<${Charts} metrics=${metrics} page=${page} level="h2" />`;
  return html`<${Empty} title="None of the watched metrics is here">All has every key that these runs wrote.<//>`;
}

/** @param {{sections: ReturnType<typeof sectionsOf>}} props */
function SectionIndex({sections}) {
  const entry = ([section, groups]) => {
    const go = () => {
      const head = document.getElementById(`section ${section}`);
      if (!head) return;
      head.scrollIntoView();
      head.focus();
    };
    const count = groups.reduce((sum, [, metrics]) => sum + metrics.length, 0);
    const name = html`${section} <small class="muted">${count}</small>`;
    return html`<button type="button" key=${section} onClick=${go}>${name}</button>`;
  };
  return html`<nav class="sections" aria-label="sections">${sections.map(entry)}</nav>`;
}

/** @param {GridProps} props */
export function AllCharts({body, page, test}) {
  const sections = sectionsOf(body.metrics.filter(test));
  if (!sections.length) {
    return html`<${Empty} title="No metric matches">
      The search looks at keys, sections, groups and the names that other tools use.
    <//>`;
  }
  const group =
    (section, groups) =>
    ([name, metrics]) => {
      const isCustom = !metrics[0].definition;
      const heading = name && (groups.length > 1 || isCustom);
      return html`<div key=${name}>
      ${heading && html`<h3 class="group">${name}</h3>`}
      <${Charts} metrics=${metrics} page=${page} level="h3" />
    </div>`;
    };
  const one = ([section, groups]) => {
    const count = groups.reduce((sum, [, metrics]) => sum + metrics.length, 0);
    return html`<section key=${section}>
      <h2 class="section" id=${`section ${section}`} tabindex="-1">
        ${section}<small>${plural(count, "metric")}</small>
      </h2>
      ${groups.map(group(section, groups))}
    </section>`;
  };
  return html`${sections.length > 1 && html`<${SectionIndex} sections=${sections} />`} ${sections.map(one)}`;
}

/** @param {{items: import("./metrics_keys.js").Item[], at: number}} props */
function ItemButtons({items, at}) {
  const {patch} = useAddress();
  const {key} = items[at];
  const without = items.filter((_, i) => i !== at);
  const move = (by) => () => {
    const moved = [...without];
    moved.splice(at + by, 0, items[at]);
    patch({keys: writeMine(moved)});
  };
  const repeat = () => patch({keys: writeMine([...items.slice(0, at + 1), items[at], ...items.slice(at + 1)])});
  const remove = () => patch({keys: writeMine(without), tab: "mine"});
  const button = (sign, label, hint, onPress, disabled = false) =>
    html`<${SignButton} label=${label} hint=${hint} onPress=${onPress} disabled=${disabled}>${sign}<//>`;
  return html`${button("◂", `move ${key} forward`, "move forward", move(-1), at === 0)}
  ${button("▸", `move ${key} back`, "move back", move(1), at === items.length - 1)}
  ${button("+", `${key} once more`, "once more, for another filter", repeat)}
  ${button("✕", `take ${key} out of Mine`, "take out", remove)}`;
}

/** @param {GridProps} props */
export function MyCharts({body, page, test}) {
  const {query, patch} = useAddress();
  const items = readMine(query.keys);
  const chart = ({key, only}, at) => {
    const metric = metricOf(body.metrics, key);
    if (!test(metric)) return null;
    const filter = (text) => patch({keys: writeMine(items.map((each, i) => (i === at ? {key, only: text} : each)))});
    const buttons = html`<${ItemButtons} items=${items} at=${at} />`;
    return html`<${MetricChart}
      key=${`${items.slice(0, at).filter((each) => each.key === key).length} ${key}`}
      ...${{metric, page, only}}
      level="h2"
      mine=${buttons}
      onFilter=${filter}
    />`;
  };
  return html`<${FileButtons} query=${query} patch=${patch} />
    ${
      items.length
        ? html`<div class="charts">${items.map(chart)}</div>`
        : html`<${Empty} title="Nothing chosen yet">
          ☆ on a chart puts it here. The address holds your choice: keep it as a bookmark, or send it.
        <//>`
    }`;
}
