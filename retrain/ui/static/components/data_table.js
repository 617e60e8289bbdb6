// Tables that sort by a column and whose rows the keys j and k go along.

import {html, useMemo} from "../lib/html.js";
import {step, useKeys} from "../keys.js";
import {Heading, Table} from "./table.js";

/** @typedef {import("./table.js").Column} Column */

/** @param {Column | undefined} column */
function sorted(rows, column, down) {
  const value = column && column.value;
  if (!value) return rows;
  const compare = (a, b) => {
    const [x, y] = [value(a), value(b)];
    const missing = Number(x === null || x === undefined) - Number(y === null || y === undefined);
    if (missing) return missing; // at the end in both directions
    const order =
      typeof x === "string" ? x.localeCompare(String(y), undefined, {numeric: true}) : Number(x) - Number(y);
    return down ? -order : order;
  };
  return [...rows].sort(compare);
}

function SortHeading({column, active, down, onSort}) {
  if (!column.value || !onSort) return html`<${Heading} column=${column} />`;
  const arrow = active ? (down ? " ↓" : " ↑") : "";
  const choose = () => onSort(column.key, active ? !down : Boolean(column.number));
  return html`<${Heading} column=${column} sorted=${active ? (down ? "descending" : "ascending") : null}>
    <button type="button" class="bare sort" onClick=${choose}>${column.title}${arrow}</button>
  <//>`;
}

// `sort`: key of the column. `onOpen`: for Enter and a click on the row. `noun`: what a row is, for the help of j and
// k; none: no keys.
export function DataTable({columns, rows, keyOf, label, sort, down = false, onSort, ...rest}) {
  const {onOpen, selected, noun, class: name = "tight wide"} = rest;
  const column = columns.find((each) => each.key === sort);
  const ordered = useMemo(() => sorted(rows, column, down), [rows, sort, down]);
  const selector = `table[aria-label="${CSS.escape(label)}"] tbody tr`;
  useKeys(
    noun ? {j: [`next ${noun}`, () => step(selector, 1)], k: [`previous ${noun}`, () => step(selector, -1)]} : null,
  );
  const heading = (each) => {
    const active = each === column;
    return html`<${SortHeading} key=${each.key} column=${each} active=${active} down=${down} onSort=${onSort} />`;
  };
  const attributes = (row) => {
    const open = (event) => {
      if (!event.target.closest("a, button, input, select, summary") && onOpen) onOpen(row);
    };
    const press = (event) => {
      if (event.key === "Enter") open(event);
    };
    return {
      "data-key": keyOf(row),
      tabindex: noun || onOpen ? "-1" : null,
      "aria-selected": selected ? String(selected(row)) : null,
      ...(onOpen ? {onClick: open, onKeyDown: press} : {}),
    };
  };
  return html`<${Table} ...${{columns, rows: ordered, keyOf, label, heading, attributes}} class=${name} />`;
}
