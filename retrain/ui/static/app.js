// The page's frame: header, navigation, the view that the URL names, and the server's events.

import {listen} from "./api.js";
import {themeChanged} from "./colours.js";
import {madeAt} from "./copy.js";
import {button, el, nothing, put} from "./dom.js";
import {frameKey, help, pageKeys, startKeys} from "./keys.js";
import {nameOf} from "./names.js";
import {listed, owner, tell} from "./places.js";
import {go, link, onRoute, patch, startRouter} from "./router.js";
import {campaign} from "./views/campaign.js";
import {campaigns} from "./views/campaigns.js";
import {compare} from "./views/compare.js";
import {lora} from "./views/lora.js";
import {metrics} from "./views/metrics.js";
import {notes} from "./views/notes.js";
import {problems} from "./views/problems.js";
import {prompt} from "./views/prompt.js";
import {rollouts} from "./views/rollouts.js";
import {timeline} from "./views/timeline.js";
import {tokens} from "./views/tokens.js";

// In the order of the navigation. `at`: whether a view is of a campaign, a run, either, or the whole campaign where there is one.
const VIEWS = [
  {view: "campaigns", title: "Campaigns", show: campaigns, at: "none"},
  {view: "campaign", title: "Campaign", show: campaign, at: "campaign"},
  {view: "metrics", title: "Metrics", show: metrics, at: "either"},
  {view: "problems", title: "Problems", show: problems, at: "whole"},
  {view: "prompt", title: "Same prompt", show: prompt, at: "either"},
  {view: "rollouts", title: "Rollouts", show: rollouts, at: "either"},
  {view: "tokens", title: "Tokens", show: tokens, at: "either"},
  {view: "timeline", title: "Timeline", show: timeline, at: "either"},
  {view: "lora", title: "LoRA", show: lora, at: "either"},
  {view: "compare", title: "Compare", show: compare, at: "either"},
  {view: "notes", title: "Notes", show: notes, at: "either"},
];

const main = document.getElementById("main");
const bar = document.getElementById("bar");
const live = el("span", {class: "live", role: "status"});
// What a page is told that has heard nothing for a while: anything may have changed.
const ANYTHING = ["state", "metrics", "evals", "notes", "log", "rollouts", "timeline", "comparison"];
// `turn` is new with every view: only the one in sight changes the address.
let shown = null, state = null, turn = null, stopListening = null, listeningTo = null;
listed().then(() => { if (state) drawBar(); }, () => { /* The view in sight says it. */ });

function crumbs() {
  const above = owner(state.place);
  const parts = [el("a", {href: link("campaigns"), class: "mark"}, "retrain")];
  if (!state.place) return parts;
  if (above) {
    parts.push(el("a", {href: link(above.kind === "campaign" ? "campaign" : "metrics", above.place), title: above.place}, above.name));
    if (above.place !== state.place) parts.push(el("a", {href: link("metrics", state.place), title: state.place}, nameOf(state.place)));
  } else {
    parts.push(el("a", {href: link("metrics", state.place), title: state.place}, nameOf(state.place)));
  }
  return parts;
}

function tabs() {
  if (!state.place) return null;
  const above = owner(state.place);
  const campaign = above && above.kind === "campaign" ? above.place : null;
  const items = VIEWS.filter((each) => each.at !== "none" && (each.at !== "campaign" || campaign || !above)).map((each) => {
    const place = each.at === "campaign" || each.at === "whole" ? campaign || state.place : state.place;
    return el("a", {href: link(each.view, place), "aria-current": each.view === state.view ? "page" : null}, each.title);
  });
  return el("nav", {"aria-label": "views"}, items);
}

function drawBar() {
  put(bar, el("nav", {class: "crumbs", "aria-label": "place"}, crumbs()), tabs(),
    el("div", {class: "end"}, live,
      button("?", help, {title: "keys (?)", "aria-label": "keys and help"}),
      button("◐", theme, {title: "light or dark", "aria-label": "light or dark"})));
}

function theme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try { localStorage.setItem("retrain-theme", root.dataset.theme); } catch (error) { /* Only remembered where storage is allowed. */ }
  themeChanged();
}

function follow(place) {
  if (listeningTo === place) return;
  if (stopListening) stopListening();
  listeningTo = place;
  let lost = false;
  stopListening = listen(place, {
    changed: (event) => { if (shown && shown.changed) shown.changed(event); },
    view: ({url}) => { if (typeof url === "string" && /^\/(?!\/)/.test(url)) go(url); },
    state: (word) => {
      live.className = `live ${word}`;
      live.textContent = word === "live" ? "live" : word === "copy" ? `copy of ${madeAt()}` : "connection lost";
      // Whatever view is in sight by then, what happened meanwhile was told to none.
      if (word === "live" && lost && shown && shown.changed) shown.changed({place, what: ANYTHING});
      lost = word === "lost";
    },
  });
}

function show(next) {
  const view = VIEWS.find((each) => each.view === next.view);
  const same = shown && state && state.view === next.view && state.place === next.place;
  state = next;
  drawBar();
  if (same) { if (shown.update) shown.update(next); return; }
  if (shown && shown.stop) shown.stop();
  shown = null;
  const own = turn = {};
  pageKeys({});
  scrollTo(0, 0);
  if (!view || (view.at !== "none" && !next.place)) {
    put(main, nothing("There is no such page", `${next.view} is none of the views.`), el("p", {class: "state"}, el("a", {href: link("campaigns")}, "All campaigns")));
    document.title = "retrain";
    return;
  }
  put(main);
  main.dataset.view = next.view;
  shown = view.show(main, next, {places: (list) => { tell(list); drawBar(); }, patch: (...change) => { if (turn === own) patch(...change); }});
  pageKeys(shown.keys);
  document.title = [shown.title || view.title, next.place, "retrain"].filter(Boolean).join(" · ");
  follow(next.place);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", themeChanged);
startKeys();
frameKey("t", "light or dark", theme);
VIEWS.filter((each) => each.at !== "none").forEach((each, i) => frameKey(String((i + 1) % 10), each.title, () => {
  const tab = [...bar.querySelectorAll("nav[aria-label=views] a")].find((one) => one.textContent === each.title);
  if (tab) go(tab.getAttribute("href"));
}));
onRoute(show);
startRouter();
