// The server's JSON, and what it says by itself (server-sent events); in a copy without a server, what was kept of it.

import {answer as kept, isCopy} from "./copy.js";

const AGAIN_MS = 15000;

function apiError(sentence) {
  return Object.assign(new Error(sentence), {sentence});
}

/**
 * get("curves", {at, key: [a, b]}, signal): lists repeat their key. Throws an error with the server's one `sentence`.
 * @returns {Promise<any>}
 */
export async function get(name, params = {}, signal = /** @type {AbortSignal | null} */ (null)) {
  if (isCopy()) {
    const body = await kept(name, params);
    if (body !== null) return body;
    throw apiError("This copy does not hold that: retrain ui shows it from the run's own files.");
  }
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(params)) {
    if (value === null || value === undefined || value === "") continue;
    for (const each of [value].flat()) query.append(key, each);
  }
  const answer = await fetch(`/api/${name}?${query}`, {signal, headers: {Accept: "application/json"}});
  const {status} = answer;
  const body = await answer.json().catch(() => {
    throw apiError(`The server's answer to /api/${name} is no JSON (status ${status}).`);
  });
  if (!answer.ok) throw apiError((body && body.error) || `The server answered with status ${status}.`);
  return body;
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
