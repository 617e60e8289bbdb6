// @ts-nocheck
// Charts as files: the numbers as CSV, the picture as SVG or PNG with colours of its own.

import {css} from "../colours.js";
import {download, el, say, svg} from "../dom.js";

// What a picture takes from the page's style, where it is a file of its own.
const WORN = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-size", "font-weight"];

function fileName(title, ending) {
  return `${title.replace(/[^\w.+-]+/g, "_").slice(0, 80)}.${ending}`;
}

function text(picture) {
  return new XMLSerializer().serializeToString(picture);
}

async function savePng(title, picture) {
  const size = picture.viewBox.baseVal, image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text(picture))}`;
  try { await image.decode(); } catch (error) { say("The browser cannot draw this picture"); return; }
  const canvas = el("canvas", {width: 2 * size.width, height: 2 * size.height});
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  canvas.toBlob((blob) => download(fileName(title, "png"), blob), "image/png");
}

const KINDS = [
  ["CSV", ({title, csv}) => download(fileName(title, "csv"), new Blob([csv()], {type: "text/csv"}))],
  ["PNG", ({title, picture}) => savePng(title, picture())],
  ["SVG", ({title, picture}) => download(fileName(title, "svg"), new Blob([text(picture())], {type: "image/svg+xml"}))],
];

// The menu that saves a chart: get() gives {title, csv(): text, picture(): an SVG element that stands alone}.
export function saveMenu(get) {
  const menu = el("details", {class: "menu"}, el("summary", {title: "save", "aria-label": "save this chart"}, "⤓"),
    el("div", null, KINDS.map(([kind, run]) => el("button", {type: "button", on: {click: () => { menu.open = false; run(get()); }}}, kind))));
  menu.addEventListener("focusout", (event) => { if (!menu.contains(event.relatedTarget)) menu.open = false; });
  return menu;
}

// A picture of the page as one that stands alone: a file knows nothing of the page's style.
export function painted(picture) {
  const copy = picture.cloneNode(true), real = [...picture.querySelectorAll("*")], {width, height} = picture.viewBox.baseVal;
  const root = {xmlns: "http://www.w3.org/2000/svg", width, height, "font-family": "system-ui, sans-serif", "font-size": getComputedStyle(picture).fontSize};
  for (const [name, value] of Object.entries(root)) copy.setAttribute(name, value);
  copy.removeAttribute("class");
  [...copy.querySelectorAll("*")].forEach((each, i) => {
    each.removeAttribute("class");
    if (/^(title|defs|pattern)$/.test(each.tagName)) return;
    const style = getComputedStyle(real[i]);
    for (const name of WORN) each.setAttribute(name, style.getPropertyValue(name));
  });
  copy.prepend(svg("rect", {width: "100%", height: "100%", fill: css("--raised")}));
  return copy;
}

function cell(value) {
  if (value === null || value === undefined) return "";
  const words = String(value);
  return /[",\n\r]/.test(words) ? `"${words.replace(/"/g, '""')}"` : words;
}

// A spreadsheet would run a name that begins so as a formula.
function word(value) {
  return cell(typeof value === "string" && /^[=+\-@\t]/.test(value) ? `'${value}` : value);
}

// Rows of numbers and names under these headings.
export function table(heads, rows) {
  return [heads, ...rows].map((row) => `${row.map(word).join(",")}\n`).join("");
}
