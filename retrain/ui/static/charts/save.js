// Charts as files: the numbers as CSV, the picture as SVG or PNG with colours of its own.

import {css} from "../colours.js";
import {Menu} from "../components/inputs.js";
import {download, showToast} from "../lib/browser.js";
import {html} from "../lib/html.js";

const SVG = "http://www.w3.org/2000/svg";
// What a picture takes from the page's style, where it is a file of its own.
const STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-size", "font-weight"];

function fileName(title, ending) {
  return `${title.replace(/[^\w.+-]+/g, "_").slice(0, 80)}.${ending}`;
}

function text(picture) {
  return new XMLSerializer().serializeToString(picture);
}

async function canvasOf(picture) {
  const size = picture.viewBox.baseVal;
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text(picture))}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  Object.assign(canvas, {width: 2 * size.width, height: 2 * size.height});
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas;
}

/** @returns {Promise<Blob>} */
async function png(picture) {
  const canvas = picture instanceof HTMLCanvasElement ? picture : await canvasOf(picture);
  return new Promise((done, failed) => {
    canvas.toBlob((blob) => (blob ? done(blob) : failed(new Error("no picture"))), "image/png");
  });
}

async function savePng({title, picture}) {
  try {
    download(fileName(title, "png"), await png(picture()));
  } catch (error) {
    showToast("The browser cannot draw this picture");
  }
}

async function copyPng({picture}) {
  try {
    await navigator.clipboard.write([new ClipboardItem({"image/png": png(picture())})]);
    showToast("Picture copied");
  } catch (error) {
    showToast("The browser does not allow copying pictures");
  }
}

// The menu that saves a chart, of which `get()` returns {title, csv(), picture()}; as SVG too if it is drawn as that.
export function SaveMenu({get, isSvg = true}) {
  const save = (ending, content, type) => download(fileName(get().title, ending), new Blob([content], {type}));
  const svg = () => save("svg", text(get().picture()), "image/svg+xml");
  const items = [
    ["CSV", () => save("csv", get().csv(), "text/csv")],
    ["PNG", () => savePng(get())],
    ...(isSvg ? [["SVG", svg]] : []),
    ["copy as PNG", () => copyPng(get())],
  ];
  return html`<${Menu} label="save this chart" text="⤓" items=${items} />`;
}

function setAll(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
}

// Return a copy of a picture of the page that stands alone: a file knows nothing of the page's style.
export function standaloneCopy(picture) {
  const copy = /** @type {SVGSVGElement} */ (picture.cloneNode(true));
  const originals = [...picture.querySelectorAll("*")];
  const {width, height} = picture.viewBox.baseVal;
  const size = getComputedStyle(picture).fontSize;
  setAll(copy, {xmlns: SVG, width, height, "font-family": "system-ui, sans-serif", "font-size": size});
  copy.removeAttribute("class");
  [...copy.querySelectorAll("*")].forEach((element, i) => {
    element.removeAttribute("class");
    if (/^(title|defs|pattern)$/.test(element.tagName)) return;
    const style = getComputedStyle(originals[i]);
    setAll(element, Object.fromEntries(STYLES.map((name) => [name, style.getPropertyValue(name)])));
  });
  const background = document.createElementNS(SVG, "rect");
  setAll(background, {width: "100%", height: "100%", fill: css("--raised")});
  copy.prepend(background);
  return copy;
}

function cell(value) {
  if (value === null || value === undefined) return "";
  const words = String(value);
  // A spreadsheet would run a name that begins so as a formula.
  const safe = typeof value === "string" && /^[=+\-@\t]/.test(value) ? `'${words}` : words;
  return /[",\n\r]/.test(safe) ? `"${safe.replace(/"/g, '""')}"` : safe;
}

export function table(heads, rows) {
  return [heads, ...rows].map((row) => `${row.map(cell).join(",")}\n`).join("");
}
