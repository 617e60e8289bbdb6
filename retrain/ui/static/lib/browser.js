// What the page asks of the browser: files to save, the clipboard, short messages, delayed calls.

import {visible} from "./html.js";

/** Return a function that calls `run` once there was no further call for `wait` ms; `stop` forgets the last call. */
export function later(run, wait) {
  let timer = 0;
  const call = (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => run(...values), wait);
  };
  return Object.assign(call, {stop: () => clearTimeout(timer)});
}

export function download(name, blob) {
  const anchor = document.createElement("a");
  anchor.href = URL.createObjectURL(blob);
  anchor.download = name;
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(anchor.href), 10000);
}

let toastTimer = 0;

export function showToast(text) {
  const toast = /** @type {HTMLElement} */ (document.getElementById("toast"));
  toast.textContent = visible(text);
  toast.classList.add("on");
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => toast.classList.remove("on"), 2400);
}

export async function copy(text, message = "Copied") {
  try {
    await navigator.clipboard.writeText(text);
    showToast(message);
  } catch (error) {
    const area = document.createElement("textarea");
    area.className = "away";
    area.setAttribute("aria-hidden", "true");
    area.value = text;
    document.body.append(area);
    area.select();
    showToast(document.execCommand("copy") ? message : "The browser does not allow copying");
    area.remove();
  }
}
