// Answers of /api/curves: the whole line, and a finer one of the part in sight.

import {useAnswer} from "./answer.js";
import {useRef} from "./html.js";

const OPTIONS = {kinds: ["metrics", "evals", "state"], wait: 1500};

/**
 * Return the answer to show, its error, and how to ask again. Until the part in sight is there the whole line is
 * shown; the whole is not read for an address that has only a part of it.
 * @param {Record<string, unknown> | null} question of /api/curves, without a part
 * @param {number[] | null} zoom the part of the x axis in sight
 */
export function useCurves(question, zoom) {
  const about = question && JSON.stringify(question);
  const readWhole = useRef(/** @type {string | null} */ (null));
  if (!zoom) readWhole.current = about;
  const part = useAnswer("curves", question && zoom ? {...question, from: zoom[0], to: zoom[1]} : null, OPTIONS);
  const whole = useAnswer("curves", readWhole.current === about ? question : null, OPTIONS);
  const exact = zoom ? part : whole;
  const isNew = exact.data && exact.about === exact.question;
  const old = exact.error ? null : whole.data || part.data;
  return {body: isNew ? exact.data : old, error: exact.error, retry: exact.retry};
}

// Return the part in sight as the address holds it, "from,to" in units of the x axis; null for all of it.
export function zoomOf(query) {
  const range = (query.zoom || "").split(",").map(Number);
  return query.zoom && range.length === 2 && range.every(Number.isFinite) && range[0] < range[1] ? range : null;
}

// Return the change of the address for a part; null is all of it.
export function zoomTo(range) {
  return {zoom: range ? range.map((value) => Number(value.toPrecision(9))).join(",") : null};
}
