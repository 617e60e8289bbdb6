"""Styles and script of the pages in ``rollout_page``."""

from __future__ import annotations

STYLES = """
header p { margin-top: 0; }
.facts { display: flex; flex-wrap: wrap; gap: 10px 30px; margin: 18px 0 6px; }
.facts dt { font-size: .78rem; color: var(--muted); }
.facts dd { margin: 0; font-size: 1.15rem; font-weight: 600; font-variant-numeric: tabular-nums; }
h2 .muted { font-weight: 400; font-size: .85rem; margin-left: .4em; overflow-wrap: anywhere; }
h2 .chip { margin-left: .5em; font-weight: 400; }
.map h2 { margin-top: 1.2rem; }
.map .rows { columns: calc(var(--n) * 15px + 46px); column-gap: 24px; }
.map .rows > div { display: flex; flex-wrap: wrap; align-items: center; gap: 3px; break-inside: avoid;
  padding: 1.5px 0; }
.map b { width: 2.2em; font-size: .78rem; font-weight: 400; color: var(--muted); text-align: right; margin-right: 5px;
  font-variant-numeric: tabular-nums; }
.map b a { text-decoration: none; }
.map i { display: inline-block; width: 12px; height: 12px; border-radius: 2px; vertical-align: -1px;
  background: color-mix(in srgb, var(--c3) var(--v), var(--sunken)); border: 1px solid var(--line);
  print-color-adjust: exact; -webkit-print-color-adjust: exact; }
.map.single .rows { columns: auto; display: flex; flex-wrap: wrap; gap: 3px; }
.map.single .rows > div { padding: 0; } .map.single b { display: none; }
.map i.none { background: none; border-style: dashed; border-color: var(--bad); }
.map .v0 { --v: 0%; } .map .v1 { --v: 11%; } .map .v2 { --v: 22%; } .map .v3 { --v: 33%; } .map .v4 { --v: 44%; }
.map .v5 { --v: 55%; } .map .v6 { --v: 66%; } .map .v7 { --v: 77%; } .map .v8 { --v: 88%; } .map .v9 { --v: 100%; }
.toolbar { position: sticky; top: 0; z-index: 2; display: flex; flex-wrap: wrap; align-items: center; gap: 6px 12px;
  margin: 26px -10px 0; padding: 8px 10px; background: var(--paper); border-bottom: 1px solid var(--line);
  font-size: .85rem; }
.modes { display: inline-flex; }
.modes button { border-radius: 0; margin-left: -1px; }
.modes button:first-child { border-radius: 6px 0 0 6px; margin-left: 0; }
.modes button:last-child { border-radius: 0 6px 6px 0; }
.modes button[aria-pressed="true"] { background: var(--accent); border-color: var(--accent); color: var(--paper); }
.legend .t { padding: 0 .45em; }
#readout { color: var(--muted); margin-left: auto; white-space: pre; min-height: 1.5em; overflow: hidden;
  text-overflow: ellipsis; max-width: 100%; }
.group { scroll-margin-top: 64px; }
.prompt { background: var(--sunken); }
.small { font-size: .82rem; }
.group.one { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: 0 10px; align-items: start; }
.group.one h2 { grid-column: 1 / -1; } .group.one .samples { margin-top: 0; grid-template-columns: minmax(0, 1fr); }
.message { display: grid; grid-template-columns: 5.5em minmax(0, 1fr); gap: 0 8px; }
.role { color: var(--muted); font-size: .8rem; line-height: 1.9; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; tab-size: 4; }
.raw { margin: .3rem 0 0 calc(5.5em + 8px); font-size: .85rem; }
.raw summary, .think summary, .all summary { color: var(--muted); }
.samples { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 285px), 1fr)); gap: 10px;
  margin-top: 10px; align-items: start; }
.samples article { padding: 9px 12px 11px; min-width: 0; }
.samples article header { display: flex; flex-wrap: wrap; gap: 2px 12px; font-size: .82rem; color: var(--muted);
  font-variant-numeric: tabular-nums; border-bottom: 1px solid var(--line); padding-bottom: 5px; margin-bottom: 7px; }
.samples article header .warn { color: var(--warn); margin-left: auto; }
.parts { display: flex; flex-wrap: wrap; gap: 0 12px; font-size: .78rem; color: var(--muted); margin-bottom: 6px;
  overflow-wrap: anywhere; }
.parts i { min-width: 4.2em; } .parts b { font-weight: 600; color: var(--ink); }
.sample { font: .84rem/1.55 ui-monospace, "SF Mono", "Cascadia Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  max-height: 26em; overflow-y: auto; }
.think { margin: 0 0 .4em; padding-left: 10px; border-left: 2px solid var(--line); white-space: normal; }
.think > div { white-space: pre-wrap; color: var(--muted); }
.all { margin-top: 2.4rem; }
.t { border-radius: 2px; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
.t:hover { outline: 1px solid var(--ink); }
.h1 { --h: 14%; } .h2 { --h: 26%; } .h3 { --h: 38%; } .h4 { --h: 50%; } .h5 { --h: 62%; } .h6 { --h: 74%; }
.t.su { background: color-mix(in srgb, var(--c2) var(--h, 0%), transparent); }
.t.up { background: color-mix(in srgb, var(--c1) var(--h, 0%), transparent); }
.t.dn { background: color-mix(in srgb, var(--c5) var(--h, 0%), transparent); }
.t.pl { background: color-mix(in srgb, var(--c4) 45%, transparent); }
@media (max-width: 640px) {
  .group.one { display: block; } .group.one .samples { margin-top: 10px; }
  .message { grid-template-columns: minmax(0, 1fr); } .raw { margin-left: 0; }
  .toolbar { position: static; } .facts { gap: 8px 22px; } #readout { margin-left: 0; width: 100%; }
}
@media print {
  .sample { max-height: none; overflow: visible; } .samples { grid-template-columns: repeat(3, 1fr); }
  .map b a { color: inherit; }
}
"""

SCRIPT = r"""
(() => {
  const samples = [...document.querySelectorAll(".sample")];
  const toolbar = document.getElementById("toolbar"), readout = document.getElementById("readout");
  const legend = document.getElementById("legend"), unfold = document.getElementById("unfold");
  if (!toolbar) return;
  const thoughts = [...document.querySelectorAll("details.think")];
  unfold.hidden = !thoughts.length;
  unfold.addEventListener("click", () => {
    const open = thoughts.some(t => !t.open);
    thoughts.forEach(t => { t.open = open; });
    unfold.textContent = open ? "fold thinking" : "unfold thinking";
  });
  const numbers = text => text ? text.split(" ").map(Number) : [];
  const tokens = new Map();
  const parsed = element => {
    if (tokens.has(element)) return tokens.get(element);
    const data = element.dataset;
    const read = { l: numbers(data.l), s: numbers(data.s), a: data.a === undefined ? null : numbers(data.a), p: null };
    if (data.p !== undefined) {
      read.p = [];
      numbers(data.p).forEach((run, i) => { for (let k = 0; k < run; k++) read.p.push(i % 2); });
    }
    tokens.set(element, read);
    return read;
  };
  let largest = 0;
  for (const element of samples) for (const a of parsed(element).a || []) largest = Math.max(largest, Math.abs(a));
  const level = share => Math.round(6 * Math.min(1, share));
  const css = (mode, read, i) => {
    if (mode === "s") return "su h" + level(read.s[i] / 400);
    if (mode === "p") return read.p && read.p[i] ? "pl" : "";
    const a = read.a ? read.a[i] : 0;
    return a ? (a > 0 ? "up h" : "dn h") + Math.max(1, level(Math.sqrt(Math.abs(a) / largest))) : "";
  };
  const clear = element => {
    element.querySelectorAll("span.t").forEach(span => span.replaceWith(...span.childNodes));
    element.normalize();
    delete element.dataset.shown;
  };
  const colour = (element, mode) => {
    if (element.dataset.l === undefined || element.dataset.shown === mode) return;
    if (element.dataset.shown) clear(element);
    const read = parsed(element), nodes = [];
    const walk = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) if (!walk.currentNode.parentElement.closest("summary")) nodes.push(walk.currentNode);
    let token = 0, left = read.l[0] || 0;
    for (const node of nodes) {
      const characters = Array.from(node.data), parts = document.createDocumentFragment();
      for (let at = 0; at < characters.length;) {
        while (left === 0 && token < read.l.length) left = read.l[++token] || 0;
        const rest = token < read.l.length, there = characters.length - at, take = rest ? Math.min(left, there) : there;
        const text = characters.slice(at, at + take).join("");
        if (rest) {
          const span = document.createElement("span");
          span.className = "t " + css(mode, read, token);
          span.dataset.i = token;
          span.textContent = text;
          parts.append(span);
        } else parts.append(text);
        at += take;
        left -= rest ? take : 0;
      }
      node.replaceWith(parts);
    }
    element.dataset.shown = mode;
  };
  let mode = "none";
  const seen = new IntersectionObserver(entries => {
    for (const entry of entries) if (entry.isIntersecting && mode !== "none") colour(entry.target, mode);
  }, { rootMargin: "600px" });
  const span = (name, text) => `<span class="t ${name}">${text}</span>`;  // constants only
  const scale = (largest / 1000).toFixed(2);
  const words = {
    none: "",
    s: ["0", 1, 2, 3, "≥ 4 nats"].map((t, i) => span("su h" + [0, 2, 3, 5, 6][i], t)).join(""),
    a: span("dn h6", "−" + scale) + span("dn h3", "") + span("", "0") + span("up h3", "") + span("up h6", "+" + scale),
    p: span("pl", "planning token"),
  };
  const choose = wanted => {
    mode = wanted;
    for (const button of toolbar.querySelectorAll("[data-mode]"))
      button.setAttribute("aria-pressed", String(button.dataset.mode === mode));
    legend.innerHTML = words[mode];
    readout.textContent = mode === "none" ? "" : "point at a token";
    seen.disconnect();
    for (const element of samples) mode === "none" ? clear(element) : seen.observe(element);
  };
  toolbar.addEventListener("click", event => {
    if (event.target.dataset.mode) choose(event.target.dataset.mode);
  });
  document.addEventListener("mouseover", event => {
    const at = event.target.closest && event.target.closest(".sample span.t");
    if (!at) return;
    const read = parsed(at.closest(".sample")), i = Number(at.dataset.i);
    const facts = [JSON.stringify(at.textContent), `token ${i}`, `surprisal ${(read.s[i] / 100).toFixed(2)}`];
    if (read.a) facts.push(`advantage ${(read.a[i] / 1000).toFixed(3)}`);
    if (read.p && read.p[i]) facts.push("planning");
    readout.textContent = facts.join(" · ");
  });
  addEventListener("beforeprint", () => { if (mode !== "none") samples.forEach(element => colour(element, mode)); });
  const asked = /^#colou?r=([sap])$/.exec(location.hash);
  if (asked && toolbar.querySelector(`[data-mode="${asked[1]}"]`)) choose(asked[1]);
})();
"""
