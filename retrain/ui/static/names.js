// What places and runs are called, and which place holds another.

// The last part of a place: the name of its directory.
export function nameOf(place) {
  return place.slice(place.lastIndexOf("/") + 1);
}

/** @param {{run_id?: string, place: string}} run */
export function runName(run) {
  return run.run_id || nameOf(run.place);
}

// The innermost of these places that is `place` or lies above it; null where none does.
export function holder(places, place) {
  const holders = places.filter((each) => place === each || place.startsWith(`${each}/`));
  return holders.sort((a, b) => b.length - a.length)[0] || null;
}
