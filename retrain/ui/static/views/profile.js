// One number of a rollout along its tokens: a line, where turns begin, the chosen token.

import {NUMBERS, valueText} from "../components/token_scales.js";
import {extent, number} from "../format.js";
import {html, useMemo} from "../lib/html.js";

const WIDE = 1000;
const TALL = 100;
const MOST = 1000;

// Of many tokens, each place of the line shows the least and the greatest.
function linePath(values, x, y) {
  const bin = Math.max(1, Math.ceil(values.length / MOST));
  let path = "";
  let isDown = false;
  for (let i = 0; i < values.length; i += bin) {
    const ends = extent(values.slice(i, i + bin));
    if (ends) {
      path += `${isDown ? "L" : "M"}${x(i)} ${y(ends[0])}`;
      if (ends[1] !== ends[0]) path += `L${x(i)} ${y(ends[1])}`;
      else if (!isDown) path += "h.01";
    }
    isDown = ends !== null;
  }
  return path;
}

function profileOf(name, values) {
  const {kind} = NUMBERS[name];
  const [low, high] = extent(values) || [0, 1];
  const bottom = kind === "range" || kind === "which" ? low : Math.min(0, low);
  const top = Math.max(kind === "flag" ? 1 : 0, high);
  const x = (i) => (((i + 0.5) / values.length) * WIDE).toFixed(1);
  const y = (value) => (TALL - 3 - ((value - bottom) / (top - bottom || 1)) * (TALL - 6)).toFixed(1);
  const ends = `from ${valueText(name, low)} to ${valueText(name, high)}, highest at token ${values.indexOf(high)}`;
  return {bottom, top, ends, path: linePath(values, x, y), zero: bottom < 0 && top > 0 ? y(0) : null, x};
}

export function Profile({name, values, starts, chosen, pointed, onPick, onPoint}) {
  const {bottom, top, ends, path, zero, x} = useMemo(() => profileOf(name, values), [name, values]);
  const many = values.length;
  const token = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    return Math.max(0, Math.min(many - 1, Math.floor(((event.clientX - box.left) / box.width) * many)));
  };
  const upright = (at, css = "") => html`<line class=${css} x1=${at} x2=${at} y1="0" y2=${TALL} />`;
  const turns = starts.slice(1).map((first) => upright(((first / many) * WIDE).toFixed(1)));
  const {title} = NUMBERS[name];
  const picture = {viewBox: `0 0 ${WIDE} ${TALL}`, preserveAspectRatio: "none", role: "img"};
  const events = {
    onClick: (event) => onPick(token(event)),
    onPointerMove: (event) => onPoint(token(event)),
    onPointerLeave: () => onPoint(null),
  };
  return html`<figure class="profile">
    <figcaption>
      <b>${title}</b>
      <span class="muted"> along the ${many} tokens${starts.length > 1 ? `, ${starts.length} turns` : ""}</span>
    </figcaption>
    <div class="frame">
      <span class="tick top">${number(top)}</span><span class="tick">${number(bottom)}</span>
      <svg ...${picture} aria-label=${`${title} over ${many} tokens, ${ends}`} ...${events}>
        ${zero !== null && html`<line class="zero" x1="0" x2=${WIDE} y1=${zero} y2=${zero} />`}${turns}
        <path class="along" d=${path} />
        ${pointed !== null && upright(x(pointed))}${chosen !== null && upright(x(chosen), "cursor")}
      </svg>
    </div>
    <div class="ends"><span>0</span><span>${many - 1}</span></div>
  </figure>`;
}
