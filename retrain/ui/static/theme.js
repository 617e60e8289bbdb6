// The chosen theme, before anything is drawn: a classic script, so that the page never flashes in the other one.
try {
  const theme = localStorage.getItem("retrain-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch (error) {
  // Storage may be forbidden: the system's theme holds.
}
