// "Why?" beside a number: what it is, what is healthy, what was noted about it in this run, and what to do.

import {get} from "./api.js";
import {button, el, failed, loading, put} from "./dom.js";
import {number} from "./format.js";
import {nameOf} from "./names.js";
import {link} from "./router.js";

const MOST_RUNS = 12;

// What is said of a key in all of these runs: the metric once, every remark with its run.
async function ask(key, places) {
  const answers = await Promise.allSettled(places.slice(0, MOST_RUNS).map((at) => get("why", {key, at})));
  const good = answers.map((each, i) => ({...each.value, place: places[i]})).filter((each, i) => answers[i].status === "fulfilled");
  if (!good.length) throw answers[0].reason;
  return {metric: good[0].metric, values: good.filter((each) => each.value !== null),
    notes: good.flatMap((each) => each.notes.map((note) => ({...note, run: nameOf(each.place)})))};
}

// places: the runs that it is asked of.
export function why(key, places) {
  const body = el("div", null, loading());
  const dialog = el("dialog", {class: "why", "aria-labelledby": "why-title"},
    el("div", {class: "head"}, el("h2", {id: "why-title"}, key), button("Close", () => dialog.close())), body);
  dialog.addEventListener("close", () => dialog.remove());
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  document.body.append(dialog);
  dialog.showModal();
  ask(key, places).then((answer) => put(body, words(answer, places)), (error) => put(body, failed(error)));
}

function now(values) {
  if (!values.length) return null;
  const all = values.map((each) => each.value), low = Math.min(...all), high = Math.max(...all);
  return `${number(low)}${low === high ? "" : ` to ${number(high)}`} at step ${Math.max(...values.map((each) => each.step))}${values.length > 1 ? ` of ${values.length} runs` : ""}`;
}

function words({metric, notes, values}, places) {
  const fact = (name, value) => value ? [el("dt", null, name), el("dd", null, value)] : null;
  const healthy = metric && metric.healthy && metric.healthy.text;
  return [
    metric && metric.definition ? el("p", null, metric.definition) : el("p", {class: "muted"}, "The catalogue has no definition of this key: it comes from your own code or from another tool."),
    el("dl", {class: "facts"}, metric ? [fact("now", now(values)), fact("unit", metric.unit), fact("healthy", healthy), fact("section", metric.section),
      fact("also called", (metric.aliases || []).join(", ")), fact("note", metric.note)] : null),
    notes && notes.length ? el("div", null, el("h3", null, "Noted here"), el("ul", {class: "plain"}, notes.map((note) =>
      el("li", {class: note.level === "warning" ? "warn" : ""}, `${note.run}, step ${note.step}: ${note.text}`,
        note.remedy ? el("div", {class: "muted"}, note.remedy) : null)))) : el("p", {class: "muted"}, "Nothing was noted about it here."),
    el("p", {class: "small"}, el("a", {href: link("notes", places[0])}, "all notes and the log")),
  ];
}
