// Light or dark, before anything is drawn: as chosen here, else as the system has it.
"use strict";
(() => {
  let kept = null;
  try { kept = localStorage.getItem("theme"); } catch { /* storage is refused: the system decides */ }
  if (kept) document.documentElement.dataset.theme = kept;
})();
