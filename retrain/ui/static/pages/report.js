// The charts of a campaign's report, from the data that the page carries. All texts and tables stand in the HTML.

import {conditionLines} from "../charts/curve_lines.js";
import {columnsOf} from "../charts/data.js";
import {Distribution} from "../charts/histogram.js";
import {startThemeButton, themeChanged} from "../colours.js";
import {Chart} from "../components/chart.js";
import {Legend} from "../components/marks.js";
import {html, render, useMemo, useState} from "../lib/html.js";
import {Forests} from "../views/campaign_parts.js";

// A metric by condition: means with bands, the runs as thin lines, and marks for evaluations of a part of the problems.
function Curves({title, words, x, unit, range, body}) {
  const [zoom, setZoom] = useState(null);
  const lines = useMemo(() => {
    const ofPart = ({label, index, part}) =>
      part.length ? [{name: `${label}, part`, index, kind: "points", sparse: true, ...columnsOf(part)}] : [];
    return [...body.conditions.flatMap(ofPart), ...conditionLines(body, true)];
  }, []);
  const looks = {x, unit, range, zoom, height: 240, group: `report ${x}`, share: unit === "%"};
  return html`<${Chart} title=${title} words=${words} lines=${lines} ...${looks} onZoom=${setZoom} />`;
}

// Canvases keep the colours that they were drawn with: on paper those of the light theme.
function startPrinting() {
  const {dataset} = document.documentElement;
  /** @type {string | undefined} */
  let theme;
  const show = (name) => {
    if (name) dataset.theme = name;
    else delete dataset.theme;
    themeChanged();
  };
  addEventListener("beforeprint", () => {
    theme = dataset.theme;
    show("light");
  });
  addEventListener("afterprint", () => show(theme));
}

const KINDS = {curves: Curves, forests: Forests, distribution: Distribution, legend: Legend};
const charts = JSON.parse(/** @type {HTMLElement} */ (document.getElementById("charts")).textContent || "{}");
for (const place of /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll("[data-charts]"))) {
  const drawn = charts[place.dataset.charts || ""].map(({kind, ...props}) => html`<${KINDS[kind]} ...${props} />`);
  render(html`${drawn}`, place);
}
startThemeButton();
/** @type {HTMLElement} */ (document.getElementById("theme")).addEventListener("click", themeChanged);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", themeChanged);
startPrinting();
