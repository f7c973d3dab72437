// Chosen before the page is drawn, so that it does not flash. Without a choice, the system's is used.
(() => {
  try {
    const chosen = localStorage.getItem("perco-theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch { /* storage may be forbidden: then the system's theme is used */ }
})();
