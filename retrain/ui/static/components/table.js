// Tables by columns.

import {html} from "../lib/html.js";

/**
 * @typedef {object} Column
 * @property {string} key names the column in the address
 * @property {any} title
 * @property {(row: any) => any} cell what the row shows
 * @property {(row: any) => string | number | null | undefined} [value] what the row is sorted by; none: not sortable
 * @property {boolean} [number] aligned to the right
 * @property {boolean} [head] its cells are the rows' headings
 * @property {(row: any) => number | null} [share] of the largest value, from 0 to 1: tints the cell, whose text says it
 *   too
 * @property {string} [hint]
 */

// A column's heading; `children` stand for its title.
export function Heading({column: {number, hint, title}, sorted = null, children = title}) {
  const name = number ? "number" : null;
  return html`<th scope="col" class=${name} title=${hint} aria-sort=${sorted}>${children}</th>`;
}

function Cell({column: {title, cell, number, head, share}, row}) {
  const name = [number && "number", share && "tint"].filter(Boolean).join(" ") || null;
  const style = share ? {"--much": `${Math.round(45 * Math.max(0, Math.min(1, share(row) || 0)))}%`} : null;
  const content = cell(row);
  if (head) return html`<th scope="row">${content}</th>`;
  return html`<td class=${name} style=${style} data-name=${title}>${content}</td>`;
}

// `region`: Tab reaches it, so that keys scroll it: for a wide table without links. `tall`: many rows scroll inside
// of it. `attributes`: of a row.
export function Table({columns, rows, keyOf, label, class: name = "tight", region, tall, heading, attributes}) {
  const place = region ? {tabindex: "0", role: "region", "aria-label": label} : {};
  const head = heading || ((column) => html`<${Heading} key=${column.key} column=${column} />`);
  const cells = (row) => columns.map((column) => html`<${Cell} key=${column.key} column=${column} row=${row} />`);
  const body = (row) => html`<tr key=${keyOf(row)} ...${attributes && attributes(row)}>${cells(row)}</tr>`;
  return html`<div class=${tall ? "scroll tall" : "scroll"} ...${place}>
    <table class=${name} aria-label=${label}>
      <thead><tr>${columns.map(head)}</tr></thead>
      <tbody>${rows.map(body)}</tbody>
    </table>
  </div>`;
}
