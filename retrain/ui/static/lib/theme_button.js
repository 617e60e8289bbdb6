// Light and dark, and the button that switches between them on a page of its own.

// Return the theme that the page has from now on.
export function switchTheme() {
  const {dataset} = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  dataset.theme = (dataset.theme || system) === "dark" ? "light" : "dark";
  return dataset.theme;
}

export function startThemeButton() {
  const button = /** @type {HTMLButtonElement} */ (document.getElementById("theme"));
  button.hidden = false;
  button.addEventListener("click", switchTheme);
}
