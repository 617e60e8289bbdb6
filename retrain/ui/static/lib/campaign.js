// The campaign around a place, for views that offer its other runs.

import {campaignOf} from "../places.js";
import {useAnswer} from "./answer.js";
import {useEffect, useState} from "./html.js";

/**
 * Return what `/api/campaign` says of the campaign that holds this place; of a run without one, of the run.
 * @returns {import("./answer.js").Answer}
 */
export function useCampaign(place) {
  const [at, setAt] = useState(/** @type {string | null} */ (null));
  useEffect(() => {
    let wanted = true;
    campaignOf(place).then((above) => wanted && setAt(above));
    return () => {
      wanted = false;
    };
  }, [place]);
  return useAnswer("campaign", at === null ? null : {at});
}
