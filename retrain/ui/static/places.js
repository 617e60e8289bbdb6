// What there is: the list of campaigns and runs, read by the page that shows it, and who holds a place.

import {holder} from "./names.js";

/** @type {{place: string, name: string, kind: string}[]} and more, as /api/places has it */
let list = [];

export function setPlaces(places) {
  list = places;
}

/** Return the campaign or run of the list that holds a place, itself or a run's campaign; null where none does. */
export function owner(place) {
  const places = list.map((each) => each.place);
  const found = holder(places, place);
  return list.find((each) => each.place === found) || null;
}
