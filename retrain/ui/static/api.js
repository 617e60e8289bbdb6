// The server's JSON, and what it says by itself (server-sent events); in a copy without a server, what was kept of it.

import {answer as kept, isCopy} from "./copy.js";

const AGAIN_MS = 15000;

class ApiError extends Error {
  constructor(status, sentence) {
    super(sentence);
    this.status = status;
    this.sentence = sentence;
  }
}

/**
 * get("curves", {at, key: [a, b]}, signal): lists repeat their key. Throws ApiError with the server's one sentence, and
 * AbortError once nobody waits for the answer.
 * @returns {Promise<any>}
 */
export async function get(name, params, signal) {
  const body = await ask(name, params, signal);
  if (signal) signal.throwIfAborted();
  return body;
}

/** @returns {Promise<any>} */
async function ask(name, params, signal) {
  if (isCopy()) {
    const body = await kept(name, params || {});
    if (body !== null) return body;
    throw new ApiError(404, "This copy does not hold that: retrain ui shows it from the run's own files.");
  }
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(params || {})) {
    if (value === null || value === undefined || value === "") continue;
    for (const each of Array.isArray(value) ? value : [value]) query.append(key, each);
  }
  const answer = await fetch(`/api/${name}?${query}`, {signal, headers: {Accept: "application/json"}});
  const {status} = answer;
  let body = null;
  try {
    body = await answer.json();
  } catch (error) {
    if (isAborted(error)) throw error;
    throw new ApiError(status, `The server's answer to /api/${name} is no JSON (status ${status}).`);
  }
  if (!answer.ok) throw new ApiError(status, (body && body.error) || `The server answered with status ${status}.`);
  return body;
}

// Whether a request ended because nobody waits for it any more.
export function isAborted(error) {
  return error && error.name === "AbortError";
}

// Events of a place: changed({place, what, rows}), and state("live" | "lost" | "copy"). Returns how to stop.
export function listen(place, {changed, state}) {
  if (isCopy()) {
    state("copy");
    return () => {};
  }
  /** @type {EventSource} */
  let source;
  let timer = 0;
  const open = () => {
    source = new EventSource(place ? `/api/events?at=${encodeURIComponent(place)}` : "/api/events");
    source.addEventListener("open", () => state("live"));
    source.addEventListener("changed", (event) => changed(JSON.parse(event.data)));
    source.addEventListener("error", () => {
      state("lost");
      // The browser tries again by itself only where nothing answered.
      if (source.readyState === EventSource.CLOSED) timer = setTimeout(open, AGAIN_MS);
    });
  };
  open();
  return () => {
    clearTimeout(timer);
    source.close();
  };
}
