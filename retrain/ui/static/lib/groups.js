// Groups of runs as /api/curves gives them: names that say in what they differ, and colours by one key.

import {COLOURS} from "../colours.js";
import {nameOf} from "../names.js";

const USUAL = ["campaign", "condition"];

/**
 * Return the keys that runs are grouped by: campaign and condition, so that a group differs in its seeds alone; with a
 * key for the colour also by it, or by it alone.
 */
export function groupKeys(by, isAlone) {
  if (!by) return USUAL;
  return isAlone ? [by] : [by, ...USUAL.filter((key) => key !== by)];
}

export function shownValue(value) {
  if (value === null || value === undefined) return "not set";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

/**
 * Return the groups with the `label` and the `index` that they are drawn with. Names leave out what all groups share.
 * With a key for the colour each of its values has one, and the groups that have it differ in dash and shape.
 */
export function namedGroups(groups, by) {
  const keys = Object.keys(groups.length ? groups[0].group : {});
  const valuesOf = (key) => [...new Set(groups.map(({group}) => shownValue(group[key])))];
  const telling = keys.filter((key) => valuesOf(key).length > 1);
  const named = telling.length ? telling : keys.slice(-1);
  const campaigns = valuesOf("campaign");
  const isShort = new Set(campaigns.map(nameOf)).size === campaigns.length;
  const text = (group, key) => {
    const value = shownValue(group[key]);
    if (key === "campaign") return isShort ? nameOf(value) : value;
    return key === by && !USUAL.includes(key) ? `${key.slice(key.lastIndexOf(".") + 1)} ${value}` : value;
  };
  const colours = by ? valuesOf(by) : [];
  const uses = Array(COLOURS).fill(0);
  return groups.map((each, i) => {
    const colour = by ? colours.indexOf(shownValue(each.group[by])) % COLOURS : i;
    const index = by ? colour + COLOURS * uses[colour]++ : i;
    const texts = named.map((key) => text(each.group, key));
    return {...each, label: [...new Set(texts)].join(" · "), index};
  });
}
