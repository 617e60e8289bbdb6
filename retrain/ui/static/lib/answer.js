// Answers of the API as components use them.

import {get, gone} from "../api.js";
import {useCallback, useEffect, useMemo, useRef, useState} from "./html.js";
import {useChanges} from "./live.js";

/**
 * @typedef {object} Answer
 * @property {any} data the newest answer, null before the first
 * @property {string | null} about the question that `data` answers
 * @property {boolean} isCurrent whether that is what was asked last
 * @property {any} error of the newest request; null once it was answered
 * @property {boolean} loading
 * @property {() => void} retry asks again
 */

const NOTHING = {data: null, about: null, error: null, loading: true};

/**
 * Fetch `/api/<name>` with `params` (null: nothing is asked yet), and again when files of these `kinds` change. The old
 * answer stays until the new one is there; an answer to an earlier question is dropped.
 * @param {string} name
 * @param {Record<string, unknown> | null} params
 * @param {{kinds?: string[] | null, wait?: number}} [options]
 * @returns {Answer}
 */
export function useAnswer(name, params, {kinds = null, wait = 2000} = {}) {
  const question = params && JSON.stringify([name, params]);
  const [state, setState] = useState(/** @type {Omit<Answer, "isCurrent" | "retry">} */ (NOTHING));
  const controller = useRef(/** @type {AbortController | null} */ (null));
  const took = useRef(0); // ms of the newest answer
  // A server that is slow to answer is asked less often.
  const pause = useCallback(() => Math.max(wait, 5 * took.current), [wait]);
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
        if (controller.current === own && !gone(error)) setState((old) => ({...old, error, loading: false}));
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
  useChanges(kinds, retry, pause);
  return {...state, isCurrent: state.data !== null && state.about === question, retry};
}

/**
 * Return the value; the object of an earlier rendering where it says the same.
 * @template T
 * @param {T} value of JSON
 * @returns {T}
 */
export function useSame(value) {
  return useMemo(() => value, [JSON.stringify(value)]);
}
