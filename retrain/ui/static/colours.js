// The conditions' colours, dashes and marks: those of the report, so that a condition looks alike everywhere.

import {el} from "./dom.js";

export const COLOURS = 8;
export const DASHES = [[], [6, 3], [2, 3], [9, 3, 2, 3]];

export function colour(index) {
  return `var(--c${(index || 0) % COLOURS + 1})`;
}

let known = {};

// The value that a variable has in the theme of now, for canvases.
export function css(name) {
  if (!(name in known)) {
    const probe = el("span", {class: "away"});
    probe.style.color = `var(${name})`;
    document.body.append(probe);
    known[name] = getComputedStyle(probe).color;
    probe.remove();
  }
  return known[name];
}

export function ink(index, alpha = 1) {
  return faded(css(`--c${(index || 0) % COLOURS + 1}`), alpha);
}

export function faded(rgb, alpha) {
  const parts = rgb.match(/[\d.]+/g) || [0, 0, 0];
  return `rgba(${parts[0]}, ${parts[1]}, ${parts[2]}, ${alpha})`;
}

export function themeChanged() {
  known = {};
  document.dispatchEvent(new CustomEvent("theme"));
}

export function swatch(index) {
  return el("span", {class: `swatch dash${(index || 0) % DASHES.length}`, style: {"--series": colour(index)}, "aria-hidden": "true"});
}

export function name(label, index) {
  return el("span", {class: "condition"}, swatch(index), label);
}
