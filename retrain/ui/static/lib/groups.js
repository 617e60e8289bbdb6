// Groups of runs as /api/curves gives them: names that say in what they differ, and colours by one key.

import {COLOURS} from "../colours.js";
import {nameOf} from "../names.js";

const USUAL = ["campaign", "condition"];

// Return the keys that runs are grouped by: campaign and condition, so that a group differs in its seeds alone; with a
// key for the colour also by it, or by it alone.
export function groupKeys(by, isAlone) {
  if (!by) return USUAL;
  return isAlone ? [by] : [by, ...USUAL.filter((key) => key !== by)];
}

export function shownValue(value) {
  if (value === null || value === undefined) return "not set";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

/**
 * Return each group's index of colour, dash and shape: one colour for each value of the key, and another dash and shape
 * for each group that has it.
 * @returns {number[]}
 */
function indices(groups, by) {
  const values = groups.map(({group}) => shownValue(group[by]));
  const order = [...new Set(values)];
  const uses = new Map();
  return values.map((value, i) => {
    if (!by) return i;
    const colour = order.indexOf(value) % COLOURS;
    const variant = uses.get(colour) || 0;
    uses.set(colour, variant + 1);
    return colour + COLOURS * variant;
  });
}

// Return the groups with the `label` and the `index` that they are drawn with. Names leave out what all groups share.
export function namedGroups(groups, by) {
  const keys = Object.keys(groups.length ? groups[0].group : {});
  const differs = (key) => new Set(groups.map(({group}) => shownValue(group[key]))).size > 1;
  const telling = keys.filter(differs);
  const named = telling.length ? telling : keys.slice(-1);
  const campaigns = [...new Set(groups.map(({group}) => group.campaign))];
  const isShort = new Set(campaigns.map((place) => nameOf(place || ""))).size === campaigns.length;
  const text = (group, key) => {
    const value = shownValue(group[key]);
    if (key === "campaign") return isShort ? nameOf(value) : value;
    return key === by && !USUAL.includes(key) ? `${key.slice(key.lastIndexOf(".") + 1)} ${value}` : value;
  };
  const index = indices(groups, by);
  return groups.map((each, i) => {
    const texts = named.map((key) => text(each.group, key));
    return {...each, label: [...new Set(texts)].join(" · "), index: index[i]};
  });
}
