// Any campaigns or runs beside each other: their curves on one chart, or in what two of them differ.

import {Tabs} from "../components/inputs.js";
import {Title} from "../components/states.js";
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
  const isPair = (query.tab || (query.b ? "pair" : "curves")) === "pair";
  const words = isPair ? "in what two campaigns or runs differ" : "runs of any campaigns and tools on one chart";
  const choose = (tab) => patch({tab, ...(tab === "pair" ? {} : {a: null, b: null})});
  return html`<${Title} title="Compare" words=${words}>
      <${Tabs} label="what to compare" options=${TABS} value=${isPair ? "pair" : "curves"} onChoose=${choose} />
    <//>
    <${isPair ? Pair : Groups} />`;
}
