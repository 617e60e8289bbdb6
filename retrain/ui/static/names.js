// @ts-nocheck
// What places and runs are called, and which place holds another.

// The last part of a place: the name of its directory.
export function nameOf(place) {
  return place.split("/").pop();
}

export function runName(run) {
  return run.run_id || nameOf(run.place);
}

// The innermost of these places that is `place` or lies above it; null where none does.
export function holder(places, place) {
  return places.filter((each) => place === each || place.startsWith(`${each}/`)).sort((a, b) => b.length - a.length)[0] || null;
}
