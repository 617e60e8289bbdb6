// The page of a run's timeline: the steps that it carries, a window of them at a time.

import {StepTimes, StepWindow, WINDOW, stepOf} from "../components/step_times.js";
import {html, render, useLayoutEffect, useState} from "../lib/html.js";
import {startThemeButton} from "../colours.js";

function Times({data}) {
  const {shown: all, phases, lanes} = data;
  const [from, setFrom] = useState(Math.max(0, all.length - WINDOW));
  const [chosen, setChosen] = useState("");
  const shown = all.slice(from, from + WINDOW);
  const move = (start) => setFrom(Math.max(0, Math.min(all.length - 1, start)));
  const walk = (by) => {
    const at = all.indexOf(stepOf(shown, chosen)) + by;
    if (at < 0 || at >= all.length) return;
    setChosen(String(all[at].step));
    if (at < from || at >= from + WINDOW) move(at < from ? from - WINDOW : from + WINDOW);
  };
  // Before the next event, which may be a key right after a click.
  useLayoutEffect(() => {
    const press = ({key}) => {
      if (key === "h" || key === "l") walk(key === "h" ? -1 : 1);
    };
    document.addEventListener("keydown", press);
    return () => document.removeEventListener("keydown", press);
  });
  const place = {shown, from, to: from + WINDOW, count: all.length, words: "; h and l go from step to step"};
  return html`<div class="tools no-print"><${StepWindow} ...${place} onMove=${move} /></div>
    <${StepTimes} ...${{shown, phases, lanes}} step=${chosen} choose=${(step) => setChosen(String(step))} />`;
}

startThemeButton();
const data = JSON.parse(/** @type {HTMLElement} */ (document.getElementById("spans")).textContent || "{}");
render(html`<${Times} data=${data} />`, /** @type {HTMLElement} */ (document.getElementById("times")));
