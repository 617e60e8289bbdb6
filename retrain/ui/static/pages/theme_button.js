// The button of a page of its own that switches between light and dark.

export function startThemeButton() {
  const button = /** @type {HTMLButtonElement} */ (document.getElementById("theme"));
  button.hidden = false;
  button.addEventListener("click", () => {
    const {dataset} = document.documentElement;
    const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    dataset.theme = (dataset.theme || system) === "dark" ? "light" : "dark";
  });
}
