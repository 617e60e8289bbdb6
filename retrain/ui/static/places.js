// What there is: the list of campaigns and runs, read once and again by the page that shows it, and who holds a place.

import {get} from "./api.js";
import {holder} from "./names.js";

/** @typedef {{place: string, name: string, kind: string}} Place and more, as /api/places has it */

/** @type {Place[]} */
let list = [];
/** @type {Promise<void> | null} */
let first = null;

export function tell(places) {
  list = places;
}

// The list, once it is there; read anew where it could not be read.
export function listed() {
  const fail = (error) => {
    first = null;
    throw error;
  };
  first = first || get("places").then((body) => tell(body.places), fail);
  return first;
}

// The campaign or run of the list that holds a place, itself or a run's campaign; null where none does.
export function owner(place) {
  const places = list.map((each) => each.place);
  const found = holder(places, place);
  return list.find((each) => each.place === found) || null;
}

// The same, once the list is read; it is read again for a place that is newer than it.
export async function ownerOf(place) {
  try {
    await listed();
    if (!owner(place)) {
      first = null;
      await listed();
    }
  } catch (error) {
    // Whoever shows the place says what is wrong.
  }
  return owner(place);
}

// The campaign that holds a place; the place itself where none does.
export async function campaignOf(place) {
  const above = await ownerOf(place);
  return above && above.kind === "campaign" ? above.place : place;
}
