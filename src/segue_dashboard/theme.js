// Which colours has the page? Those of the system, light or dark; the choice is kept by the browser.

import { $ } from "./dom.js";

const THEMES = ["system", "light", "dark"];
const NAME = "segue-theme";
const dark = matchMedia("(prefers-color-scheme: dark)");

export const startTheme = (changed = () => {}) => {
  const dress = () => {
    const chosen = localStorage.getItem(NAME) ?? "system";
    document.documentElement.dataset.theme = chosen === "system" ? (dark.matches ? "dark" : "light") : chosen;
    $("theme").setAttribute("aria-label", `Colours: ${chosen}`);
    $("theme").title = `Colours: ${chosen}`;
    changed();
  };
  $("theme").addEventListener("click", () => {
    const at = THEMES.indexOf(localStorage.getItem(NAME) ?? "system");
    localStorage.setItem(NAME, THEMES[(at + 1) % THEMES.length]);
    dress();
  });
  dark.addEventListener("change", dress);
  dress();
};
