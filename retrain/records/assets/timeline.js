(() => {
  const data = JSON.parse(document.getElementById("spans").textContent);
  const svg = document.getElementById("detail"), readout = document.getElementById("readout");
  const names = 92, row = 26, top = 22;
  const bottom = top + row * data.lanes.length, height = bottom + 18, last = Math.max(...data.steps.map(s => s[2]));
  svg.style.height = `${height + 2}px`;  // its border included
  let from = 0, to = Math.max(last, 1), width = 900;
  const make = (tag, attributes, parent) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const key in attributes) element.setAttribute(key, attributes[key]);
    parent.append(element);
    return element;
  };
  const words = ms => {
    if (ms === 0) return "0";
    if (ms < 1000) return `${ms.toFixed(ms < 10 ? 1 : 0)} ms`;
    if (ms < 1e5) return `${(ms / 1000).toFixed(1)} s`;
    const seconds = Math.round(ms / 1000);
    return `${Math.floor(seconds / 60)}:${String(seconds % 60).padStart(2, "0")}`;
  };
  const draw = () => {
    width = svg.clientWidth || 900;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.replaceChildren();
    const scale = (width - names) / (to - from), x = t => names + (t - from) * scale;
    data.lanes.forEach((lane, i) => {
      if (i % 2 === 0) make("rect", { class: "lane", x: 0, y: top + i * row, width, height: row }, svg);
      make("text", { x: names - 10, y: top + i * row + 17, "text-anchor": "end" }, svg).textContent = lane;
    });
    const raw = (to - from) / Math.max(2, (width - names) / 110), power = 10 ** Math.floor(Math.log10(raw));
    const gap = [1, 2, 5, 10].map(n => n * power).find(n => n >= raw), first = Math.ceil(from / gap);
    const places = Math.max(0, Math.ceil(3 - Math.log10(gap)));
    for (let t = first * gap, i = first; t <= to; t = ++i * gap) {
      make("line", { x1: x(t), x2: x(t), y1: top - 4, y2: bottom }, svg);
      if (x(t) > width - 54) continue;
      make("text", { x: x(t) + 3, y: 13 }, svg).textContent = places ? `${(t / 1000).toFixed(places)} s` : words(t);
    }
    const ends = new Float64Array(data.lanes.length).fill(-1);
    let free = names;
    for (const [number, start, end, spans] of data.steps) {
      if (end < from || start > to) continue;
      if (x(start) >= free - 1 && x(start) < width - 34) {
        make("line", { class: "edge", x1: x(start), x2: x(start), y1: top, y2: height }, svg);
        make("text", { class: "number", x: x(start) + 3, y: height - 4 }, svg).textContent = number;
        free = x(start) + 34;
      }
      for (let k = 0; k < spans.length; k += 3) {
        const lane = spans[k], a = Math.max(names, x(spans[k + 1])), b = Math.min(width, x(spans[k + 2]));
        if (b - names < .01 || width - a < .01 || (b - a < .5 && a - ends[lane] < .5)) continue;
        const size = Math.max(1, b - a);
        ends[lane] = a + size;
        const box = make("rect", {
          class: "span " + data.classes[lane], x: a, y: top + lane * row + 5, width: size, height: row - 10,
          rx: Math.min(2, size / 3),
        }, svg);
        const [begin, length] = [spans[k + 1], spans[k + 2] - spans[k + 1]];
        box.dataset.text = `step ${number} · ${data.lanes[lane]} · ${words(length)} · from ${words(begin)}`;
      }
    }
  };
  const show = (a, b) => {
    const size = Math.min(Math.max(b - a, 1), Math.max(last, 1));
    from = Math.min(Math.max(a, 0), Math.max(last, 1) - size);
    to = from + size;
    draw();
  };
  const zoom = (factor, at) => show(at - (at - from) * factor, at + (to - at) * factor);
  const actions = {
    in: () => zoom(.5, (from + to) / 2), out: () => zoom(2, (from + to) / 2), all: () => show(0, last),
    left: () => show(from - (to - from) / 3, to - (to - from) / 3),
    right: () => show(from + (to - from) / 3, to + (to - from) / 3),
  };
  document.querySelectorAll("[data-do]").forEach(b => b.addEventListener("click", () => actions[b.dataset.do]()));
  svg.addEventListener("keydown", event => {
    const action = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", "0": "all" }[event.key];
    if (action) { event.preventDefault(); actions[action](); }
  });
  svg.addEventListener("wheel", event => {
    event.preventDefault();
    const place = from + (event.offsetX - names) / (width - names) * (to - from);
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      const by = event.deltaX / (width - names) * (to - from);
      show(from + by, to + by);
    } else zoom(event.deltaY > 0 ? 1.25 : .8, Math.max(from, place));
  }, { passive: false });
  let grabbed = null;
  svg.addEventListener("pointerdown", event => {
    grabbed = [event.clientX, from, to];
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", event => {
    if (!grabbed) return;
    const by = (event.clientX - grabbed[0]) / (width - names) * (grabbed[2] - grabbed[1]);
    show(grabbed[1] - by, grabbed[2] - by);
  });
  for (const name of ["pointerup", "pointercancel"]) svg.addEventListener(name, () => { grabbed = null; });
  document.addEventListener("mouseover", event => {
    const text = event.target.dataset && event.target.dataset.text;
    if (text) readout.textContent = text;
    const bar = event.target.closest && event.target.closest(".bar");
    if (bar) document.getElementById("stepreadout").textContent = bar.dataset.text;
  });
  document.getElementById("steps").addEventListener("click", event => {
    const bar = event.target.closest(".bar");
    const step = bar && data.steps.find(s => s[0] >= Number(bar.dataset.step));
    if (step) show(step[1], step[2]);
  });
  addEventListener("resize", draw);
  show(0, last);
})();
