// Which charts the Metrics page shows: watched ones, all by section and group, or one's own list, which the URL holds.

export function tabOf({tab = "", keys = ""}) {
  return tab || (keys ? "mine" : "watch");
}

/** Return the keys of one's own charts, each once; a comma within a key is written as %2C. @returns {string[]} */
export function readMine(text = "") {
  const plain = (key) => key.replace(/%2C/gi, ",").replace(/%25/g, "%");
  return [...new Set(text.split(",").filter(Boolean).map(plain))];
}

export function writeMine(keys) {
  return keys.map((key) => key.replace(/[%,]/g, encodeURIComponent)).join(",") || null;
}

/** Return the metric of a key of /api/metrics, also by another tool's name. */
export function metricOf(metrics, key) {
  const known = metrics.find((each) => each.key === key) || metrics.find((each) => each.aliases.includes(key));
  return known || {key, aliases: []};
}

// Return a test of metrics by a regular expression over key, other names, section and group, and what is wrong with it.
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

/** @returns {[value: string, all: any[]][]} what has each value of a property */
function grouped(all, name) {
  const values = [...new Set(all.map((each) => each[name]))];
  return values.map((value) => [value, all.filter((each) => each[name] === value)]);
}

/** Return metrics by section and group, in the order of the catalogue. @returns {[string, [string, any[]][]][]} */
export function sectionsOf(metrics) {
  return grouped(metrics, "section").map(([section, all]) => [section, grouped(all, "group")]);
}
