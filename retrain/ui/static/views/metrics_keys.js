// Which charts the Metrics page shows: watched ones, all by section and group, or one's own list, which the URL holds.

/** @typedef {{key: string, only: string}} Item a chart of one's own: a metric, and a filter of runs */

/** Return the tab of the address: watch, all or mine. */
export function tabOf({tab = "", keys = ""}) {
  return tab || (keys ? "mine" : "watch");
}

/**
 * Return one's own list: "key" or "key@filter", with commas; a comma or @ within is written as %2C, %40.
 * @returns {Item[]}
 */
export function readMine(text = "") {
  const plain = (part) => part.replace(/%2C/gi, ",").replace(/%40/g, "@").replace(/%25/g, "%");
  return text
    .split(",")
    .filter(Boolean)
    .map((item) => {
      const [key, only = ""] = item.split("@").map(plain);
      return {key, only};
    });
}

/** @param {Item[]} items */
export function writeMine(items) {
  const safe = (text) => text.replace(/[%,@]/g, encodeURIComponent);
  return items.map(({key, only}) => safe(key) + (only ? `@${safe(only)}` : "")).join(",") || null;
}

/** Return the metric of a key of /api/metrics, also by another tool's name. */
export function metricOf(metrics, key) {
  const known = metrics.find((each) => each.key === key) || metrics.find((each) => each.aliases.includes(key));
  return known || {key, aliases: []};
}

/**
 * Return a test of metrics by a regular expression over key, other names, section and group, and what is wrong with it.
 * @returns {{test: (metric: any) => boolean, wrong: string | null}}
 */
export function searchOf(text, tag) {
  const tagged = ({key}) => !tag || key.split("/").includes(tag);
  try {
    const pattern = new RegExp(text || "", "i");
    const names = ({key, section, group, aliases}) => [key, section, group, ...aliases].filter(Boolean);
    return {test: (metric) => tagged(metric) && names(metric).some((each) => pattern.test(each)), wrong: null};
  } catch (error) {
    const reason = error.message.replace(/^Invalid regular expression: /, "");
    return {test: tagged, wrong: `Not a regular expression: ${reason}.`};
  }
}

/** Return a test of runs by a filter: a regular expression, or part of a name where it is none. */
export function runFilter(filter) {
  const {test, wrong} = searchOf(filter, "");
  if (wrong) return (name) => name.toLowerCase().includes(filter.toLowerCase());
  return (name) => test({key: name, aliases: []});
}

/**
 * Return metrics by section and group, in the order of the catalogue.
 * @returns {[string, [string, any[]][]][]}
 */
export function sectionsOf(metrics) {
  const grouped = (all, name) => {
    const values = [...new Set(all.map((each) => each[name]))];
    return values.map((value) => /** @type {any} */ ([value, all.filter((each) => each[name] === value)]));
  };
  return grouped(metrics, "section").map(([section, all]) => [section, grouped(all, "group")]);
}
