// @ts-nocheck
// Which charts the Metrics page shows: watched ones, all by section and group, or one's own list, which the URL holds.

import {button, download, el, say} from "../dom.js";
import {plural} from "../format.js";

// What a file of one's own charts may set.
const KEPT = ["keys", "x", "smooth", "lines", "logx", "logy", "clip", "full", "thin"];

// One's own list: "key" or "key@filter", with commas; a comma or @ within is written as %2C, %40.
export function readMine(text) {
  return (text || "").split(",").filter(Boolean).map((item) => {
    const [key, only] = item.split("@").map((part) => part.replace(/%2C/gi, ",").replace(/%40/g, "@").replace(/%25/g, "%"));
    return {key, only: only || ""};
  });
}

export function writeMine(items) {
  const safe = (text) => text.replace(/%/g, "%25").replace(/,/g, "%2C").replace(/@/g, "%40");
  return items.map(({key, only}) => safe(key) + (only ? `@${safe(only)}` : "")).join(",") || null;
}

// A key that the catalogue does not know: metric, section/metric or section/group/metric.
export function plainMetric(key) {
  const [name, ...above] = key.split("/").reverse();
  const [section = "General", ...group] = above.reverse();
  return {key, section, group: group.join("/"), name, unit: "", definition: "", healthy: null, range: null, sample: false, aliases: []};
}

// A test for keys from a regular expression over key, aliases and section; {test, wrong: the sentence or null}.
export function searchOf(text, tag) {
  const tagged = (metric) => !tag || metric.key.split("/").includes(tag);
  if (!text) return {test: tagged, wrong: null};
  try {
    const pattern = new RegExp(text, "i");
    return {test: (metric) => tagged(metric) && [metric.key, metric.section, ...(metric.aliases || [])].some((each) => pattern.test(each)), wrong: null};
  } catch (error) {
    return {test: tagged, wrong: `Not a regular expression: ${error.message.replace(/^Invalid regular expression: /, "")}.`};
  }
}

// [[section, [[group, [metric…]]…]]…] in the order of the catalogue.
export function sections(metrics) {
  const out = new Map();
  for (const metric of metrics) {
    if (!out.has(metric.section)) out.set(metric.section, new Map());
    const groups = out.get(metric.section);
    if (!groups.has(metric.group || "")) groups.set(metric.group || "", []);
    groups.get(metric.group || "").push(metric);
  }
  return [...out].map(([section, groups]) => [section, [...groups]]);
}

// Buttons that save one's own charts as a file, and open such a file.
export function fileButtons(query, patch) {
  const pick = el("input", {type: "file", accept: "application/json,.json", class: "away", "aria-label": "file of charts", tabindex: "-1", on: {change: async () => {
    try {
      const {charts} = JSON.parse(await pick.files[0].text());
      patch({...Object.fromEntries(KEPT.map((key) => [key, typeof charts[key] === "string" ? charts[key] : null])), tab: "mine", open: null});
      say(plural(readMine(charts.keys).length, "chart"));
    } catch (error) { say("This is no file of charts"); }
  }}});
  const save = () => {
    const charts = Object.fromEntries(KEPT.filter((key) => query[key]).map((key) => [key, query[key]]));
    download("charts.json", new Blob([`${JSON.stringify({charts}, null, 2)}\n`], {type: "application/json"}));
  };
  return el("div", {class: "tools"}, query.keys ? button("Save as a file", save) : null, button("Open a file", () => pick.click()), pick);
}
