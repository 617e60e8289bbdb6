// What a chart's cursor stands on: the values of every line there, else the last ones.

import {isValue, last, valueAt} from "../charts/data.js";
import {X_TITLES, xText} from "../charts/ticks.js";
import {amount as written, difference, plural} from "../format.js";
import {html} from "../lib/html.js";
import {Swatch} from "./marks.js";

const MOST_NAMES = 6;

// `share` says how values are written: as per cent, as "points" of a difference, or plain.
function amount(value, share) {
  return share === "points" ? difference(value, true) : written(value, share);
}

// The lines that stand in the legend: means where there are any.
function leadingLines(lines) {
  const means = lines.filter((line) => line.kind === "mean");
  return means.length ? means : lines.filter((line) => line.kind !== "thin");
}

export function spokenChart(title, {lines, x, share, zoom}) {
  const leading = leadingLines(lines);
  const values = leading.slice(0, 8).flatMap((line) => {
    const end = last(line, zoom);
    return end ? [`${line.name} ${amount(end.y, share)}`] : [];
  });
  return `${title} over ${X_TITLES[x] || x}, ${plural(leading.length, "line")}. Last values: ${values.join(", ")}.`;
}

function countAt(counts, line, point) {
  const found = counts && counts.find((each) => each.index === line.index);
  if (!found) return null;
  const next = found.x.findIndex((x) => x > point.x);
  return found.n[(next < 0 ? found.x.length : next) - 1] || null;
}

// The step's own value stands beside a smoothed one, then the band, the seeds, and the point's x where it is another.
function details(line, point, {x, share, counts, cursor}, at) {
  const [raw, low, high] = [line.raw, line.low, line.high].map((values) => values && values[point.i]);
  const n = countAt(counts, line, point) || line.n;
  const elsewhere = cursor.x !== null && at !== null && xText(x, point.x) !== xText(x, at);
  return [
    isValue(raw) ? ` step ${amount(raw, share)}` : "",
    isValue(low) && isValue(high) ? ` [${amount(low, share)}, ${amount(high, share)}]` : "",
    n ? ` n ${n}` : "",
    elsewhere ? ` at ${xText(x, point.x)}` : "",
  ].join("");
}

// Return what the cursor stands on: its x, an item for each line, and the range of values where there are many lines.
function readings(options) {
  const {lines, cursor, x: kind, share, zoom, marks} = options;
  const leading = leadingLines(lines);
  const isNamed = leading.length <= MOST_NAMES;
  const pointOf = (line) => (cursor.x === null ? last(line, zoom) : valueAt(line, cursor.x));
  const points = leading.map((line) => ({line, point: pointOf(line)}));
  const known = points.flatMap(({point}) => (point ? [point] : []));
  // Not every step has a point: the label is the step of the nearest one, and a value of another step names its own.
  const closer = (a, b) => ((cursor.x === null ? b > a : Math.abs(b - cursor.x) < Math.abs(a - cursor.x)) ? b : a);
  const at = known.length ? known.map(({x}) => x).reduce(closer) : cursor.x;
  const item = ({line, point}) => ({
    line,
    value: point ? amount(point.y, share) : "–",
    rest: point ? details(line, point, options, at) : "",
  });
  const items = isNamed ? points.map(item) : [];
  // Of the other lines the one next to the pointer has its item too.
  const others = lines.filter((line) => !(isNamed && leading.includes(line)));
  const near =
    cursor.y === null ? [] : others.map((line) => ({line, point: pointOf(line)})).filter(({point}) => point);
  const far = ({point}) => Math.abs(point.y - cursor.y);
  if (near.length) items.push(item(near.reduce((best, each) => (far(each) < far(best) ? each : best))));
  const ys = known.map(({y}) => y);
  const range = `${amount(Math.min(...ys), share)} … ${amount(Math.max(...ys), share)}`;
  const where = at === null ? "" : `${cursor.x === null ? "at " : ""}${xText(kind, at)}`;
  const here = (marks || []).filter((mark) => cursor.x !== null && xText(kind, mark.x) === xText(kind, at));
  const events = [...new Set(here.map((mark) => mark.kind))].join(", ");
  return {where, events, items, many: !items.length && ys.length ? {count: leading.length, range} : null};
}

/** Return the readings as a sentence, for those who cannot see the cursor. */
export function spokenReadings(options) {
  const {where, events, items, many} = readings(options);
  const values = items.map(({line, value, rest}) => `${line.name} ${value}${rest}`);
  if (events) values.push(events);
  if (many) values.push(`${many.count} runs ${many.range}`);
  return `${X_TITLES[options.x] || options.x} ${[where, ...values].join(", ")}`;
}

export function Readout({outside = 0, ...options}) {
  const {where, events, items, many} = readings(options);
  const item = ({line, value, rest}) =>
    html`<span class="item" title=${line.name} key=${line.name}>
      <${Swatch} index=${line.index} /><span class="label">${line.name}</span><b>${value}</b>
      <span class="muted">${rest}</span>
    </span>`;
  return html`<div class="readout">
    <span class="at">${where}</span>
    ${items.map(item)}
    ${many && html`<span class="item"><span class="label">${many.count} runs</span><b>${many.range}</b></span>`}
    ${events && html`<span class="events">${events}</span>`}
    ${outside > 0 && html`<span class="muted">${outside} values outside</span>`}
  </div>`;
}
