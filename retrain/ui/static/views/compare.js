// Any campaigns or runs beside each other: their curves on one chart, or in what two of them differ.

import {Tabs} from "../components/inputs.js";
import {useAddress} from "../lib/address.js";
import {html} from "../lib/html.js";
import {Groups} from "./compare_groups.js";
import {Pair} from "./compare_pair.js";

/** @type {[string, string][]} */
const TABS = [
  ["curves", "Curves of groups"],
  ["pair", "Two runs, in detail"],
];

export function Compare() {
  const {query, patch} = useAddress();
  const tab = query.tab || (query.b ? "pair" : "curves");
  const words =
    tab === "pair" ? "in what two campaigns or runs differ" : "runs of any campaigns and tools on one chart";
  const choose = (value) => patch({tab: value, ...(value === "pair" ? {} : {a: null, b: null})});
  return html`<div class="title">
      <h1>Compare</h1>
      <p class="muted">${words}</p>
      <${Tabs} label="what to compare" options=${TABS} value=${tab} onChoose=${choose} />
    </div>
    ${tab === "pair" ? html`<${Pair} />` : html`<${Groups} />`}`;
}
