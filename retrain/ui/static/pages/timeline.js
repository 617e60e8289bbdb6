// The page of a run's timeline: the steps that it carries, a window of them at a time.

import {StepTimes, stepOf} from "../components/step_times.js";
import {html, render, useLayoutEffect, useState} from "../lib/html.js";
import {startThemeButton} from "../lib/theme_button.js";

const WINDOW = 60;

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
  const button = (text, start, disabled) =>
    html`<button type="button" disabled=${disabled} onClick=${() => move(start)}>${text}</button>`;
  return html`<div class="tools no-print">
      ${button("◂ earlier", from - WINDOW, from <= 0)}${button("later ▸", from + WINDOW, from + WINDOW >= all.length)}
      <span class="muted small">
        steps ${shown[0].step} to ${shown[shown.length - 1].step}; h and l go from step to step
      </span>
    </div>
    <${StepTimes} ...${{shown, phases, lanes}} step=${chosen} choose=${(step) => setChosen(String(step))} />`;
}

startThemeButton();
const data = JSON.parse(/** @type {HTMLElement} */ (document.getElementById("spans")).textContent || "{}");
render(html`<${Times} data=${data} />`, /** @type {HTMLElement} */ (document.getElementById("times")));
