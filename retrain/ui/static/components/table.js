// Tables by columns, which may sort by one of them, and whose rows may be opened and gone along by the keys j and k.

import {step, useKeys} from "../keys.js";
import {html, useEffect, useElement, useMemo} from "../lib/html.js";
import {button} from "./inputs.js";
import {Condition} from "./marks.js";

/**
 * @typedef {object} Column
 * @property {string} key names the column in the address
 * @property {any} title
 * @property {(row: any) => any} cell what the row shows
 * @property {(row: any) => string | number | null | undefined} [value] what the row is sorted by; none: not sortable
 * @property {boolean} [number] aligned to the right
 * @property {boolean} [head] its cells are the rows' headings
 * @property {(row: any) => number | null} [share] of the largest value, from 0 to 1: tints the cell
 * @property {string} [hint]
 */

/** @returns {Column} */
export const numberColumn = (key, title, cell, more = {}) => ({key, title, number: true, cell, ...more});

/** @type {Column} */
export const CONDITION_COLUMN = {
  key: "condition",
  title: "condition",
  cell: (row) => html`<${Condition} ...${row} />`,
};

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

function Heading({column: {key, title, value, number, hint}, active, down, onSort}) {
  const choose = () => onSort(key, active ? !down : Boolean(number));
  const arrow = active ? (down ? " ↓" : " ↑") : "";
  const isSortable = value && onSort;
  const order = active && isSortable ? (down ? "descending" : "ascending") : null;
  return html`<th scope="col" class=${number ? "number" : null} title=${hint} aria-sort=${order}>
    ${isSortable ? button(html`${title}${arrow}`, choose, {class: "bare sort"}) : title}
  </th>`;
}

function Cell({column: {title, cell, number, head, share}, row}) {
  const name = [number && "number", share && "tint"].filter(Boolean).join(" ") || null;
  const style = share ? {"--much": `${Math.round(45 * Math.max(0, Math.min(1, share(row) || 0)))}%`} : null;
  const content = cell(row);
  if (head) return html`<th scope="row">${content}</th>`;
  return html`<td class=${name} style=${style} data-name=${title}>${content}</td>`;
}

// `sort`: key of the column. `onOpen(row, {replace})`: for Enter and a click on the row. `noun`: what a row is, for the
// help of j and k; none: no keys. They move the focus; of a table with a row that is `selected` they open the next one,
// which stays in sight, and behind the last one call `onEnd(by)`. `region`: Tab reaches the table, so that keys scroll
// it: for a wide one without links. `tall`: many rows scroll inside of it.
export function Table({columns, rows, keyOf, label, sort, down = false, onSort, ...rest}) {
  const {onOpen, selected, onEnd, noun, region, tall, class: name = "tight"} = rest;
  const by = columns.find((each) => each.key === sort);
  const ordered = useMemo(() => sorted(rows, by, down), [rows, sort, down]);
  const root = useElement();
  const at = selected ? ordered.findIndex(selected) : -1;
  const chosen = at < 0 ? null : keyOf(ordered[at]);
  useEffect(() => {
    if (chosen !== null) root.current.querySelector("[aria-selected=true]").scrollIntoView({block: "nearest"});
  }, [chosen]);
  const move = (by) => () => {
    if (!selected) return step(`table[aria-label="${CSS.escape(label)}"] tbody tr`, by);
    const first = by > 0 ? 0 : ordered.length - 1;
    const row = ordered[at < 0 ? first : at + by];
    return row ? onOpen(row, {replace: at >= 0}) : onEnd && onEnd(by);
  };
  useKeys(noun ? {j: [`next ${noun}`, move(1)], k: [`previous ${noun}`, move(-1)]} : null);
  const head = (column) =>
    html`<${Heading} key=${column.key} column=${column} active=${column === by} down=${down} onSort=${onSort} />`;
  const body = (row) => {
    const open = (event) => {
      if (!event.target.closest("a, button, input, select, summary")) onOpen(row, {replace: false});
    };
    const press = (event) => event.key === "Enter" && open(event);
    const attributes = {
      "data-key": keyOf(row),
      tabindex: noun || onOpen ? "-1" : null,
      "aria-selected": selected ? String(selected(row)) : null,
      ...(onOpen ? {onClick: open, onKeyDown: press} : {}),
    };
    const cells = columns.map((column) => html`<${Cell} key=${column.key} column=${column} row=${row} />`);
    return html`<tr key=${keyOf(row)} ...${attributes}>${cells}</tr>`;
  };
  const place = region ? {tabindex: "0", role: "region", "aria-label": label} : {};
  return html`<div class=${tall ? "scroll tall" : "scroll"} ref=${root} ...${place}>
    <table class=${name} aria-label=${label}>
      <thead><tr>${columns.map(head)}</tr></thead>
      <tbody>${ordered.map(body)}</tbody>
    </table>
  </div>`;
}
