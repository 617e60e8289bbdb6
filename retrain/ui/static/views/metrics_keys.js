// Which charts the Metrics page shows: watched ones, all by section and group, or one's own list, which the URL holds.

import {plural} from "../format.js";
import {download, say} from "../lib/browser.js";
import {html, useRef} from "../lib/html.js";

/**
 * @typedef {object} Metric
 * @property {string} key
 * @property {string} section
 * @property {string} group
 * @property {string} unit
 * @property {string} definition empty where the catalogue does not know the key
 * @property {any} healthy
 * @property {any} range
 * @property {string[]} aliases
 * @property {{min: string, max: string, std: string} | null} [spread]
 * @property {string | null} [histogram]
 * @typedef {{key: string, only: string}} Item a chart of one's own: a metric, and a filter of runs
 */

// What a file of one's own charts may set.
const KEPT = ["keys", "x", "smooth", "lines", "logx", "logy", "clip", "full", "thin"];

/**
 * Return one's own list: "key" or "key@filter", with commas; a comma or @ within is written as %2C, %40.
 * @param {string | undefined} text
 * @returns {Item[]}
 */
export function readMine(text) {
  const plain = (part) => part.replace(/%2C/gi, ",").replace(/%40/g, "@").replace(/%25/g, "%");
  const items = (text || "").split(",").filter(Boolean);
  return items.map((item) => {
    const [key, only = ""] = item.split("@").map(plain);
    return {key, only};
  });
}

/** @param {Item[]} items */
export function writeMine(items) {
  const safe = (text) => text.replace(/%/g, "%25").replace(/,/g, "%2C").replace(/@/g, "%40");
  return items.map(({key, only}) => safe(key) + (only ? `@${safe(only)}` : "")).join(",") || null;
}

/**
 * Return the metric of a key, also by another tool's name; of an unknown key what its name says: metric,
 * section/metric or section/group/metric.
 * @param {Metric[]} metrics
 * @param {string} key
 * @returns {Metric}
 */
export function metricOf(metrics, key) {
  const known = metrics.find((each) => each.key === key) || metrics.find((each) => each.aliases.includes(key));
  if (known) return known;
  const parts = key.split("/");
  const section = parts.length > 1 ? parts[0] : "General";
  const group = parts.slice(1, -1).join("/");
  return {key, section, group, unit: "", definition: "", healthy: null, range: null, aliases: []};
}

/**
 * Return a test of metrics by a regular expression over key, other names, section and group, and what is wrong with it.
 * @param {string | undefined} text
 * @param {string | undefined} tag
 * @returns {{test: (metric: Metric) => boolean, wrong: string | null}}
 */
export function searchOf(text, tag) {
  const tagged = (metric) => !tag || metric.key.split("/").includes(tag);
  if (!text) return {test: tagged, wrong: null};
  try {
    const pattern = new RegExp(text, "i");
    const names = ({key, section, group, aliases}) => [key, section, group, ...aliases];
    return {test: (metric) => tagged(metric) && names(metric).some((each) => pattern.test(each)), wrong: null};
  } catch (error) {
    const reason = error.message.replace(/^Invalid regular expression: /, "");
    return {test: tagged, wrong: `Not a regular expression: ${reason}.`};
  }
}

/**
 * Return a test of runs by a filter: a regular expression, or part of a name where it is none.
 * @param {string} filter
 * @returns {(name: string) => boolean}
 */
export function runFilter(filter) {
  if (!filter) return () => true;
  try {
    const pattern = new RegExp(filter, "i");
    return (name) => pattern.test(name);
  } catch (error) {
    return (name) => name.toLowerCase().includes(filter.toLowerCase());
  }
}

/**
 * Return [[section, [[group, metrics]…]]…] in the order of the catalogue.
 * @param {Metric[]} metrics
 * @returns {[string, [string, Metric[]][]][]}
 */
export function sectionsOf(metrics) {
  /** @type {Map<string, Map<string, Metric[]>>} */
  const sections = new Map();
  for (const metric of metrics) {
    const groups = sections.get(metric.section) || new Map();
    sections.set(metric.section, groups.set(metric.group, [...(groups.get(metric.group) || []), metric]));
  }
  return [...sections].map(([section, groups]) => [section, [...groups]]);
}

/**
 * Buttons that save one's own charts as a file, and open such a file.
 * @param {{query: Record<string, string>, patch: import("../lib/address.js").Patch}} props
 */
export function FileButtons({query, patch}) {
  const picker = useRef(/** @type {HTMLInputElement | null} */ (null));
  const read = async (event) => {
    try {
      const {charts} = JSON.parse(await event.target.files[0].text());
      const kept = KEPT.map((key) => [key, typeof charts[key] === "string" ? charts[key] : null]);
      patch({...Object.fromEntries(kept), tab: "mine", open: null});
      say(plural(readMine(charts.keys).length, "chart"));
    } catch (error) {
      say("This is no file of charts");
    }
  };
  const save = () => {
    const charts = Object.fromEntries(KEPT.filter((key) => query[key]).map((key) => [key, query[key]]));
    download("charts.json", new Blob([`${JSON.stringify({charts}, null, 2)}\n`], {type: "application/json"}));
  };
  const pick = () => picker.current && picker.current.click();
  return html`<div class="tools">
    ${query.keys && html`<button type="button" onClick=${save}>Save as a file</button>`}
    <button type="button" onClick=${pick}>Open a file</button>
    <input
      ref=${picker}
      type="file"
      accept="application/json,.json"
      class="away"
      aria-label="file of charts"
      tabindex="-1"
      onChange=${read}
    />
  </div>`;
}
