// The campaign around a place, for views that offer its other runs.

import {campaignOf} from "../places.js";
import {useAnswer} from "./answer.js";
import {useEffect, useState} from "./html.js";

/** @typedef {{place: string, run_id: string, label: string, index: number, seed: number | null, state: string}} Run */

// Return the runs of the campaign that holds a place (`family`), of a run without one itself; those at or below the
// place (`runs`); and the campaign's place (`home`, null until it is known). `known` says whether the runs were read.
export function useRuns(place) {
  const [home, setHome] = useState(/** @type {string | null} */ (null));
  useEffect(() => {
    let left = false;
    campaignOf(place).then((found) => left || setHome(found));
    return () => {
      left = true;
    };
  }, [place]);
  const {data, error, retry} = useAnswer("campaign", home === null ? null : {at: home, wait_ms: 0});
  /** @type {Run[]} */
  const family = data ? data.runs : [];
  const runs = family.filter((run) => run.place === place || run.place.startsWith(`${place}/`));
  return {home, family, runs, known: data !== null, error, retry};
}
