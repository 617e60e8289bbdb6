// Any campaigns or runs beside each other.

import {html} from "../lib/html.js";
import {Pair} from "./compare_pair.js";

export function Compare() {
  return html`<div class="title">
      <h1>Compare</h1>
      <p class="muted">in what two campaigns or runs differ</p>
    </div>
    <${Pair} />`;
}
