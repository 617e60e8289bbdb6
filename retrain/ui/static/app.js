// The page's frame: header, navigation, the view that the address names, and the server's events.

import {get, listen} from "./api.js";
import {switchTheme, themeChanged} from "./colours.js";
import {Empty, Failed} from "./components/states.js";
import {madeAt} from "./copy.js";
import {frameKey, help, startKeys} from "./keys.js";
import {AddressContext, go, link, startRouter} from "./lib/address.js";
import {html, render, useErrorBoundary} from "./lib/html.js";
import {EVERY_KIND, announce} from "./lib/answer.js";
import {nameOf} from "./names.js";
import {owner, setPlaces} from "./places.js";
import {Campaign} from "./views/campaign.js";
import {Campaigns} from "./views/campaigns.js";
import {Compare} from "./views/compare.js";
import {Lora} from "./views/lora.js";
import {Metrics} from "./views/metrics.js";
import {Notes} from "./views/notes.js";
import {Problems} from "./views/problems.js";
import {Prompt} from "./views/prompt.js";
import {Rollouts} from "./views/rollouts.js";
import {Timeline} from "./views/timeline.js";
import {Tokens} from "./views/tokens.js";

/** @typedef {import("./lib/address.js").State} State */

// In the order of the navigation. `at` is the place that a view is of: none, a campaign, a campaign or a run
// ("either"), or the whole campaign where there is one; `heading` stands in the window's title.
const VIEWS = [
  {view: "campaigns", title: "Campaigns", component: Campaigns, at: "none"},
  {view: "campaign", title: "Campaign", component: Campaign, at: "campaign"},
  {view: "metrics", title: "Metrics", component: Metrics, at: "either"},
  {view: "problems", title: "Problems", component: Problems, at: "whole"},
  {view: "prompt", title: "Same prompt", component: Prompt, at: "either"},
  {view: "rollouts", title: "Rollouts", component: Rollouts, at: "either"},
  {view: "tokens", title: "Tokens", component: Tokens, at: "either"},
  {view: "timeline", title: "Timeline", component: Timeline, at: "either"},
  {view: "lora", title: "LoRA", component: Lora, at: "either"},
  {view: "compare", title: "Compare", component: Compare, at: "either"},
  {view: "notes", title: "Notes", heading: "Notes and logs", component: Notes, at: "either"},
];
const WITH_PLACE = VIEWS.filter((each) => each.at !== "none");

const main = /** @type {HTMLElement} */ (document.getElementById("main"));
const bar = /** @type {HTMLElement} */ (document.getElementById("bar"));
/** @type {State | null} */
let state = null;
/** @type {"" | "live" | "lost" | "copy"} */
let connection = "";

function viewOf({view, place}) {
  return VIEWS.find((each) => each.view === view && (each.at === "none" || place));
}

function Bar({state: {view, place}}) {
  const above = place ? owner(place) : null;
  const whole = above && above.kind === "campaign" ? above.place : null;
  const crumb = (to, at, name) => html`<a href=${link(to, at)} title=${at}>${name}</a>`;
  const item = (each) => {
    const target = each.at === "either" ? place : whole || place;
    const current = each.view === view ? "page" : null;
    return html`<a key=${each.view} href=${link(each.view, target)} aria-current=${current}>${each.title}</a>`;
  };
  const shown = WITH_PLACE.filter((each) => each.at !== "campaign" || whole || !above);
  const words = {"": "", live: "live", lost: "connection lost", copy: `copy of ${madeAt}`};
  return html`<nav class="crumbs" aria-label="place">
      <a href=${link("campaigns")} class="mark">retrain</a>
      ${above && crumb(whole ? "campaign" : "metrics", above.place, above.name)}
      ${place && (!above || above.place !== place) && crumb("metrics", place, nameOf(place))}
    </nav>
    ${place && html`<nav aria-label="views">${shown.map(item)}</nav>`}
    <div class="end">
      <span class=${`live ${connection}`} role="status">${words[connection]}</span>
      <button type="button" title="keys (?)" aria-label="keys and help" onClick=${help}>?</button>
      <button type="button" title="light or dark" aria-label="light or dark" onClick=${keepTheme}>◐</button>
    </div>`;
}

function Main({state: shown}) {
  const [error, reset] = useErrorBoundary((reason) => console.error(reason));
  const view = viewOf(shown);
  if (error) return html`<${Failed} error=${{sentence: `The page failed here: ${error}`}} retry=${reset} />`;
  if (view) return html`<${AddressContext.Provider} value=${shown}><${view.component} /><//>`;
  return html`<${Empty} title="There is no such page">${shown.view} is none of the views.<//>
    <p class="state"><a href=${link("campaigns")}>All campaigns</a></p>`;
}

let isDue = false;

// Draw in a microtask: an effect may change the address while Preact is rendering, and must not render inside of that.
function draw() {
  if (isDue || !state) return;
  isDue = true;
  queueMicrotask(() => {
    isDue = false;
    const shown = /** @type {State} */ (state);
    render(html`<${Bar} state=${shown} />`, bar);
    render(html`<${Main} key=${`${shown.view}/${shown.place}`} state=${shown} />`, main);
  });
}

function keepTheme() {
  const theme = switchTheme();
  try {
    localStorage.setItem("retrain-theme", theme);
  } catch (error) {
    // Only remembered where storage is allowed.
  }
  themeChanged();
}

/** @type {string | null} */
let listeningTo = null;
let stopListening = () => {};

function follow(place) {
  if (listeningTo === place) return;
  stopListening();
  listeningTo = place;
  stopListening = listen(place, {
    changed: announce,
    state: (word) => {
      const wasLost = connection === "lost";
      connection = word;
      draw();
      if (word === "live" && wasLost) announce({place, what: EVERY_KIND});
    },
  });
}

function show(next) {
  const isSame = state && state.view === next.view && state.place === next.place;
  state = next;
  draw();
  if (isSame) return;
  const view = viewOf(next);
  document.title = [view && (view.heading || view.title), view && next.place, "retrain"].filter(Boolean).join(" · ");
  scrollTo(0, 0);
  main.dataset.view = next.view;
  if (view) follow(next.place);
  // The view in sight says what is wrong.
  const known = ({places}) => setPlaces(places);
  if (next.place && !owner(next.place))
    get("places")
      .then(known)
      .then(draw, () => {});
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", themeChanged);
startKeys();
frameKey("t", "light or dark", keepTheme);
WITH_PLACE.forEach(({title}, i) =>
  frameKey(String((i + 1) % 10), title, () => {
    const tabs = [...bar.querySelectorAll("nav[aria-label=views] a")];
    const tab = tabs.find((each) => each.textContent === title);
    if (tab) go(/** @type {string} */ (tab.getAttribute("href")));
  }),
);
main.replaceChildren();
startRouter(show);
