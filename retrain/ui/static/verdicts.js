// A verdict as it is drawn: its class (never a new judgement, only the server's word), and the axis of its bars.

import {niceStep} from "./format.js";

// "cannot tell", interim and exploratory findings are drawn hatched everywhere.
export function isOpen(word) {
  return /^(cannot tell|interim|exploratory)/.test(word || "");
}

export function classOf(word) {
  const short = (word || "").replace(/^typical runs /, "");
  if (/^better/.test(short)) return "up";
  if (/^worse/.test(short)) return "down";
  if (/^(alike|higher|lower)/.test(short)) return "same";
  return "unclear";
}

// Return how far the axis of several differences reaches, so that their bars can be compared.
export function reach(verdicts) {
  const ends = verdicts.flatMap((each) => [each.low, each.high, each.difference, each.margin]);
  const most = Math.max(1e-9, ...ends.filter((value) => Number.isFinite(value)).map(Math.abs));
  const step = niceStep(most / 2);
  return step * Math.ceil(most / step - 1e-9);
}
