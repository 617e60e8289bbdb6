// Colour, dash and shape of a condition by its index: those of the report, so that it looks alike everywhere; light and
// dark, and the button that switches between them on a page of its own.

export const COLOURS = 8;
export const DASHES = [[], [6, 3], [2, 3], [9, 3, 2, 3]];

/** @typedef {(x: number, y: number, r: number) => string} Shape the path of a mark around a point */
/** @type {Shape[]} */
export const SHAPES = [
  (x, y, r) => `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0Z`,
  (x, y, r) => `M${x - 0.9 * r} ${y - 0.9 * r}h${1.8 * r}v${1.8 * r}h${-1.8 * r}Z`,
  (x, y, r) => `M${x} ${y - 1.2 * r}L${x + 1.15 * r} ${y + 0.85 * r}H${x - 1.15 * r}Z`,
  (x, y, r) => `M${x} ${y - 1.3 * r}l${1.3 * r} ${1.3 * r}l${-1.3 * r} ${1.3 * r}l${-1.3 * r} ${-1.3 * r}Z`,
  (x, y, r) => `M${x} ${y + 1.2 * r}L${x + 1.15 * r} ${y - 0.85 * r}H${x - 1.15 * r}Z`,
];

// Further indices repeat the colours with other dashes and shapes.
export function dashOf(index = 0) {
  return (index + Math.floor(index / COLOURS)) % DASHES.length;
}

export function shapeOf(index = 0) {
  return index % SHAPES.length;
}

export function colour(index = 0) {
  return `var(--c${((index || 0) % COLOURS) + 1})`;
}

/** @type {Record<string, string>} */
let known = {};

// Return the value that a variable of the style sheet has in the present theme, for canvases and files.
export function css(name) {
  if (!(name in known)) {
    const probe = document.createElement("span");
    probe.className = "away";
    probe.style.color = `var(${name})`;
    document.body.append(probe);
    known[name] = getComputedStyle(probe).color;
    probe.remove();
  }
  return known[name];
}

export function ink(index = 0, alpha = 1) {
  return faded(css(`--c${((index || 0) % COLOURS) + 1}`), alpha);
}

export function faded(rgb, alpha) {
  const [red, green, blue] = rgb.match(/[\d.]+/g) || [0, 0, 0];
  return `rgba(${red}, ${green}, ${blue}, ${alpha})`;
}

export function themeChanged() {
  known = {};
  document.dispatchEvent(new CustomEvent("theme"));
}

// Return the theme that the page has from now on.
export function switchTheme() {
  const {dataset} = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  dataset.theme = (dataset.theme || system) === "dark" ? "light" : "dark";
  return dataset.theme;
}

export function startThemeButton() {
  const button = /** @type {HTMLButtonElement} */ (document.getElementById("theme"));
  button.hidden = false;
  button.addEventListener("click", switchTheme);
}
