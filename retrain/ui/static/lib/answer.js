// Answers of the API as components use them, read anew as files change.

import {get} from "../api.js";
import {useCallback, useEffect, useMemo, useRef, useState} from "./html.js";

// What a page may have missed while the connection was lost.
export const EVERY_KIND = ["state", "metrics", "evals", "notes", "log", "rollouts", "timeline", "comparison"];

/** @typedef {{place: string, what?: string[], rows?: number}} Change */

/** @type {Set<(change: Change) => void>} */
const listeners = new Set();

export function announce(change) {
  for (const listener of [...listeners]) listener(change);
}

/** @type {any} */
const NOTHING = {data: null, about: null, error: null, loading: true};

/**
 * Fetch `/api/<name>` with `params` (null: nothing is asked yet), and again when files of these `kinds` change
 * ("metrics", "evals", "notes", "log", "rollouts", "timeline", "state", "comparison"), at most once in `wait` ms. The
 * old answer stays until the new one is there; an answer to an earlier question is dropped. Returns the newest answer
 * as `data` (null before the first), the question that it is `about`, whether that `isCurrent`, the `error` of the
 * newest request, `loading`, and `retry`, which asks again.
 */
export function useAnswer(name, params, {kinds = /** @type {string[] | null} */ (null), wait = 2000} = {}) {
  const question = params && JSON.stringify([name, params]);
  const [state, setState] = useState(NOTHING);
  const controller = useRef(/** @type {AbortController | null} */ (null));
  const took = useRef(0); // ms of the newest answer
  const retry = useCallback(() => {
    if (controller.current) controller.current.abort();
    controller.current = null;
    if (!question) return;
    const own = (controller.current = new AbortController());
    const [path, values] = JSON.parse(question);
    const start = performance.now();
    setState((old) => ({...old, loading: true}));
    get(path, values, own.signal).then(
      (data) => {
        took.current = performance.now() - start;
        if (controller.current === own) setState({data, about: question, error: null, loading: false});
      },
      (error) => {
        if (controller.current === own) setState((old) => ({...old, error, loading: false}));
      },
    );
  }, [question]);
  useEffect(() => {
    retry();
    return () => {
      if (controller.current) controller.current.abort();
      controller.current = null;
    };
  }, [retry]);
  const followed = (kinds || []).join(" ");
  useEffect(() => {
    if (!followed) return;
    let [timer, last] = [0, -Infinity];
    const again = () => {
      [timer, last] = [0, performance.now()];
      retry();
    };
    const listener = (/** @type {Change} */ {what}) => {
      if (timer || (what && !what.some((kind) => followed.split(" ").includes(kind)))) return;
      // A server that is slow to answer is asked less often.
      timer = setTimeout(again, Math.max(120, last + Math.max(wait, 5 * took.current) - performance.now()));
    };
    listeners.add(listener);
    return () => {
      listeners.delete(listener);
      clearTimeout(timer);
    };
  }, [followed, wait, retry]);
  return {...state, isCurrent: state.data !== null && state.about === question, retry};
}

// Return a value of JSON; the object of an earlier rendering where it says the same.
export function useSame(value) {
  const text = useMemo(() => JSON.stringify(value), [value]);
  return useMemo(() => value, [text]);
}

const FOLLOWED = {kinds: ["metrics", "evals", "state"], wait: 700};

// Ask for "curves" or "columns" in the part in sight, `zoom`; not while `asking` is false. Until that is there, `body`
// is an earlier answer about the same lines, whatever part and smoothing it is of.
export function useCurves(name, params, zoom, asking) {
  const [from, to] = zoom || [];
  const {data, about, error, retry} = useAnswer(name, asking ? {...params, from, to} : null, FOLLOWED);
  const [earlierName, {key, x}] = JSON.parse(about || '["", {}]');
  const isSame = earlierName === name && x === params.x && String(key) === String(params.key);
  return {body: isSame ? data : null, error, retry};
}

// Return the runs of the campaign that holds a place (`family`), of a run without one itself; those at or below the
// place (`runs`); the campaign's place (`home`, null until it is known); and whether the runs are `known`.
export function useRuns(place) {
  const {data, error, retry} = useAnswer("runs", {at: place});
  const {home, runs: family} = data || {home: null, runs: []};
  const runs = family.filter((run) => run.place === place || run.place.startsWith(`${place}/`));
  return {home, family, runs, known: data !== null, error, retry};
}
