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
    const read = { l: numbers(data.l), s: numbers(data.s), p: null };
    for (const name of ["a", "v", "t"]) read[name] = data[name] === undefined ? null : numbers(data[name]);
    if (data.p !== undefined) {
      read.p = [];
      numbers(data.p).forEach((run, i) => { for (let k = 0; k < run; k++) read.p.push(i % 2); });
    }
    tokens.set(element, read);
    return read;
  };
  let largest = 0, low = Infinity, high = -Infinity;
  for (const element of samples) {
    const read = parsed(element);
    for (const a of read.a || []) largest = Math.max(largest, Math.abs(a));
    for (const v of read.v || []) { low = Math.min(low, v); high = Math.max(high, v); }
  }
  const level = share => Math.round(6 * Math.min(1, share));
  const signed = (thousandths, digits) => (thousandths / 1000).toFixed(digits).replace("-", "−");
  const css = (mode, read, i) => {
    if (mode === "s") return "su h" + level(read.s[i] / 400);
    if (mode === "p") return read.p && read.p[i] ? "pl" : "";
    if (mode === "v") return read.v ? "va h" + level((read.v[i] - low) / (high - low || 1)) : "";
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
  const stop = (css, at, range) => span(css, (css[0] === "u" ? "+" : "") + signed(at, range < 200 ? 3 : 2));
  const a = (css, share) => stop(css, share * largest, largest);  // the tint is the root of the share
  const v = (css, share) => stop(css, low + share * (high - low), high - low);
  const words = {
    none: "",
    s: ["0", 1, 2, 3, "≥ 4 nats"].map((t, i) => span("su h" + [0, 2, 3, 5, 6][i], t)).join(""),
    a: largest ? a("dn h6", -1) + a("dn h3", -.25) + span("", "0") + a("up h3", .25) + a("up h6", 1) : span("", "0"),
    p: span("pl", "planning token"),
    v: high > low ? v("va h0", 0) + v("va h3", .5) + v("va h6", 1) : high === low ? span("", signed(low, 3)) : "",
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
    if (read.a) facts.push(`advantage ${signed(read.a[i], 3)}`);
    if (read.v) facts.push(`V ${signed(read.v[i], 3)}` + (read.t ? ` (target ${signed(read.t[i], 3)})` : ""));
    if (read.p && read.p[i]) facts.push("planning");
    readout.textContent = facts.join(" · ");
  });
  addEventListener("beforeprint", () => { if (mode !== "none") samples.forEach(element => colour(element, mode)); });
  const asked = /^#colou?r=([sapv])$/.exec(location.hash);
  if (asked && toolbar.querySelector(`[data-mode="${asked[1]}"]`)) choose(asked[1]);
})();
