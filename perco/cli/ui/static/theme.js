// Chosen before the page is drawn, so that it does not flash. Without a choice, the system's theme is used.
(() => {
  const root = document.documentElement.dataset;
  const system = matchMedia("(prefers-color-scheme: dark)");
  try {
    const chosen = localStorage.getItem("perco-theme");
    if (chosen === "light" || chosen === "dark") root.chosen = chosen;
  } catch { /* storage may be forbidden: then the system's theme is used */ }
  const follow = () => { root.theme = root.chosen ?? (system.matches ? "dark" : "light"); };
  follow();
  system.addEventListener("change", follow);
})();
