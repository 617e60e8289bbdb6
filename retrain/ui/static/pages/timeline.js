// The page of a run's timeline: the steps that it carries, a window of them at a time.

import {StepTimes, StepWindow, WINDOW, neighbour, rowsFrom} from "../components/step_times.js";
import {html, render, useLayoutEffect, useState} from "../lib/html.js";
import {startThemeButton} from "../colours.js";

function Times({data}) {
  const {shown: all, phases, lanes} = data;
  const [{from, to, step}, setState] = useState({...rowsFrom(all.length - WINDOW), step: ""});
  const patch = (changes) => setState((old) => ({...old, ...changes}));
  const shown = all.slice(from, to);
  const place = {shown, from, to, count: all.length};
  // Before the next event, which may be a key right after a click.
  useLayoutEffect(() => {
    const press = ({key}) => {
      if (key === "h" || key === "l") patch(neighbour(place, step, key === "h" ? -1 : 1));
    };
    document.addEventListener("keydown", press);
    return () => document.removeEventListener("keydown", press);
  });
  const move = (start) => patch(rowsFrom(start));
  const words = "; h and l go from step to step";
  return html`<div class="tools no-print"><${StepWindow} ...${place} words=${words} onMove=${move} /></div>
    <${StepTimes} ...${{shown, phases, lanes, step}} choose=${(to) => patch({step: String(to)})} />`;
}

startThemeButton();
const data = JSON.parse(/** @type {HTMLElement} */ (document.getElementById("spans")).textContent || "{}");
render(html`<${Times} data=${data} />`, /** @type {HTMLElement} */ (document.getElementById("times")));
