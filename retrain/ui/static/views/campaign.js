// @ts-nocheck
// One campaign: what it found, in a sentence and as a picture; curves; cost; how many more seeds; its runs.

import {get, gone, newest} from "../api.js";
import {el, failed, loading, notRecorded, put, spaced} from "../dom.js";
import {ago, hours, plural} from "../format.js";
import {curves} from "./campaign_curves.js";
import {costs, forests, runsTable, seeds, traces, verdicts} from "./campaign_parts.js";
import {step} from "../keys.js";

const MOST_WORKERS = 8;

// On which workers, where there are several; of many the first ones.
function where(workers) {
  const more = workers.length - MOST_WORKERS;
  return workers.length ? ` on ${workers.slice(0, MOST_WORKERS).join(", ")}${more > 0 ? ` and ${plural(more, "more worker")}` : ""}` : "";
}

function head(body) {
  const {summary} = body;
  const {runs} = summary;
  const facts = [plural((summary.conditions || []).length, "condition"), `${runs.done} of ${plural(runs.planned, "run")} done`,
    runs.running ? `${runs.running} running${where(summary.workers || [])}` : "", runs.failed ? `${runs.failed} failed` : "",
    summary.device_hours ? `${hours(summary.device_hours)} of device time` : "", summary.updated ? `changed ${ago(summary.updated)}` : "", body.fresh === false ? "being compared anew …" : ""];
  return el("div", {class: "title"}, el("h1", null, summary.name, el("span", {class: `pill ${summary.state}`}, summary.state)),
    el("p", {class: "muted"}, facts.filter(Boolean).join(" · ")));
}

export function campaign(root, state, frame) {
  const {patch} = frame, next = newest();
  let plots = null, body = null;
  const top = el("div", null, loading("Reading the campaign …"));
  const middle = el("div"), bottom = el("div");
  put(root, top, middle, bottom);

  function draw() {
    put(top, head(body), verdicts(body), forests(body),
      notRecorded(body.summary.missing));
    put(bottom, el("div", {class: "two"}, costs(body), seeds(body)), runsTable(body), traces(body));
  }

  async function read() {
    try {
      body = await get("campaign", {at: state.place}, next());
      draw();
      if (plots) { plots.about(body); return; }
      plots = curves(state, body, patch);
      put(middle, plots.root);
    } catch (error) {
      if (gone(error)) return;
      if (!body) put(top, failed(error, read)); else console.warn(error);
    }
  }
  read();
  const again = spaced(read, 2500);
  return {
    title: "Campaign",
    update(to) { state = to; if (plots) plots.update(to); },
    changed(event) {
      const what = event.what || [];
      if (plots && (what.includes("metrics") || what.includes("evals"))) plots.changed();
      again();
    },
    stop() { next.stop(); again.stop(); if (plots) plots.stop(); },
    keys: {j: ["next run", () => step("#runs a.open", 1)], k: ["previous run", () => step("#runs a.open", -1)],
      Escape: ["all of the x axis again", () => plots && plots.whole()], l: ["next metric", () => plots && plots.move(1)], h: ["previous metric", () => plots && plots.move(-1)]},
  };
}
