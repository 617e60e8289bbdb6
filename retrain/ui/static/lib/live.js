// Changes of files, as the server reports them, for the components that show them.

import {spaced} from "./browser.js";
import {useEffect, useRef} from "./html.js";

// What a page may have missed while the connection was lost.
export const EVERY_KIND = ["state", "metrics", "evals", "notes", "log", "rollouts", "timeline", "comparison"];

/** @typedef {{place: string, what?: string[], rows?: number}} Change */

/** @type {Set<(change: Change) => void>} */
const listeners = new Set();

export function announce(change) {
  for (const listener of [...listeners]) listener(change);
}

// Call `run` when files of these kinds changed ("metrics", "evals", "notes", "log", "rollouts", "timeline", "state",
// "comparison"; null: never), at most once in `wait` ms.
export function useChanges(kinds, run, /** @type {number | (() => number)} */ wait = 2000) {
  const newest = useRef(run);
  newest.current = run;
  const wanted = kinds && kinds.join(" ");
  useEffect(() => {
    if (wanted === null) return;
    const names = wanted.split(" ");
    const soon = spaced(() => newest.current(), wait);
    const listener = (/** @type {Change} */ {what}) => {
      if (!what || what.some((kind) => names.includes(kind))) soon();
    };
    listeners.add(listener);
    return () => {
      listeners.delete(listener);
      soon.stop();
    };
  }, [wanted, wait]);
}
