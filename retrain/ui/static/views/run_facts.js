// What stands above the charts of a single run: its last numbers, the command that launched it, what the marks mean.

import {Copyable} from "../components/inputs.js";
import {Rate} from "../components/marks.js";
import {number, percent, plural} from "../format.js";
import {useAddress} from "../lib/address.js";
import {html} from "../lib/html.js";

/** @typedef {{kind: string, step: number, x: number}} Mark */

const SIGNS = {evaluation: "▽", checkpoint: "▼", resume: "┆"};
// A tile's name says what these count.
const UNITS = ["share", "reward", "tokens/s"];

/** @param {{tile: any}} props */
function Tile({tile: {key, name, unit, value, step, low, high, n}}) {
  const {linkTo} = useAddress();
  const plain = unit === "share" ? percent(value) : number(value);
  const figure =
    low === undefined
      ? html`<b>${plain}</b>`
      : html`<${Rate} value=${value} n=${n} low=${low} high=${high} digits=${1} />`;
  return html`<a class="tile quiet" href=${linkTo({open: key})} title=${`${key}: open the chart`}>
    <span class="muted">${name}</span>
    <span>${figure}${!UNITS.includes(unit) && html` <small class="muted">${unit}</small>`}</span>
    <small class="muted">step ${step}</small>
  </a>`;
}

/** @param {{marks: Mark[]}} props */
function MarkLegend({marks}) {
  const kinds = Object.entries(SIGNS).map(([kind, sign]) => ({
    kind,
    sign,
    n: marks.filter((mark) => mark.kind === kind).length,
  }));
  const entry = ({kind, sign, n}) =>
    html`<span class=${`mark ${kind}`} key=${kind}><span aria-hidden="true">${sign}</span> ${plural(n, kind)}</span>`;
  return html`<p class="small muted marks" aria-label="marks on the charts">${kinds.filter(({n}) => n).map(entry)}</p>`;
}

/** @param {{facts: {tiles: any[], command: string | null, marks: Mark[]}}} props */
export function RunFacts({facts: {tiles, command, marks}}) {
  return html`<section class="runfacts" aria-label="this run">
    <div class="tiles">${tiles.map((tile) => html`<${Tile} key=${tile.key} tile=${tile} />`)}</div>
    ${command && html`<${Copyable} text=${command} label="command that launched it" message="Command copied" />`}
    ${marks.length > 0 && html`<${MarkLegend} marks=${marks} />`}
  </section>`;
}
