// What stands above the charts of a single run: its last numbers, the command that launched it, what the marks mean.

import {Copyable} from "../components/inputs.js";
import {Rate} from "../components/marks.js";
import {number, percent, plural} from "../format.js";
import {useAddress} from "../lib/address.js";
import {html} from "../lib/html.js";

const SIGNS = {evaluation: "▽", checkpoint: "▼", resume: "┆"};
// A tile's name says what these count.
const UNITS = ["share", "reward", "tokens/s"];

function Tile({tile: {key, name, unit, value, step, low, high, n}}) {
  const {linkTo} = useAddress();
  const plain = unit === "share" ? percent(value) : number(value);
  const rate = html`<${Rate} rate=${value} n=${n} low=${low} high=${high} digits=${1} />`;
  const figure = low === undefined ? html`<b>${plain}</b>` : rate;
  return html`<a class="tile quiet" href=${linkTo({open: key})} title=${`${key}: open the chart`}>
    <span class="muted">${name}</span>
    <span>${figure}${!UNITS.includes(unit) && html` <small class="muted">${unit}</small>`}</span>
    <small class="muted">step ${step}</small>
  </a>`;
}

// `facts`: the answer of /api/run.
export function RunFacts({facts: {tiles, command, marks}}) {
  const entry = ([kind, sign]) => {
    const n = marks.filter((mark) => mark.kind === kind).length;
    const content = html`<span aria-hidden="true">${sign}</span> ${plural(n, kind)}`;
    return n > 0 && html`<span class=${`mark ${kind}`} key=${kind}>${content}</span>`;
  };
  const all = Object.entries(SIGNS).map(entry);
  return html`<section class="runfacts" aria-label="this run">
    <div class="tiles">${tiles.map((tile) => html`<${Tile} key=${tile.key} tile=${tile} />`)}</div>
    ${command && html`<${Copyable} text=${command} label="command that launched it" message="Command copied" />`}
    ${marks.length > 0 && html`<p class="small muted marks" aria-label="marks on the charts">${all}</p>`}
  </section>`;
}
