// Answers of /api/curves and /api/columns: all of a line, and finer points of the part in sight.

import {useAnswer} from "./answer.js";
import {useRef} from "./html.js";

const FOLLOWED = {kinds: ["metrics", "evals", "state"], wait: 700};

// Return whether an answer is of these lines, whatever part and smoothing of them.
function isAbout(answer, name, params) {
  if (!answer.data) return false;
  const [asked, {key, x}] = JSON.parse(String(answer.about));
  return asked === name && x === params.x && String(key) === String(params.key);
}

/**
 * Return the answer to show, its error, and how to ask again. Until the part in sight is there, what is known of the
 * lines is shown; all of them is not read for an address that has only a part. Nothing is read while `asking` is false.
 * @param {"curves" | "columns"} name
 * @param {number[] | null} zoom the part of the x axis in sight
 */
export function useCurves(name, params, zoom, asking) {
  const readWhole = useRef(/** @type {string | null} */ (null));
  const about = JSON.stringify([name, params]);
  if (!zoom) readWhole.current = about;
  const [from, to] = zoom || [];
  const whole = useAnswer(name, asking && readWhole.current === about ? params : null, FOLLOWED);
  const part = useAnswer(name, asking && zoom ? {...params, from, to} : null, FOLLOWED);
  const exact = zoom ? part : whole;
  const known = [...(exact.isCurrent ? [exact] : []), whole, part].find((answer) => isAbout(answer, name, params));
  return {body: known ? known.data : null, error: exact.error, retry: exact.retry};
}
