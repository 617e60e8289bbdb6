// The campaign around a place, for views that offer its other runs.

import {useAnswer} from "./answer.js";

/**
 * Return the runs of the campaign that holds a place (`family`), of a run without one itself; those at or below the
 * place (`runs`); and the campaign's place (`home`, null until it is known). `known` says whether the runs were read.
 */
export function useRuns(place) {
  const {data, error, retry} = useAnswer("runs", {at: place});
  const {home, runs: family} = data || {home: null, runs: []};
  const runs = family.filter((run) => run.place === place || run.place.startsWith(`${place}/`));
  return {home, family, runs, known: data !== null, error, retry};
}
