// What the theme leaves open: the colours of a first visit, search in a book opened from a folder, the focus after a drawer,
// and a filter above long tables.
"use strict";

// Before anything is drawn: a page whose scheme is "auto" has that of the system.
const root = document.documentElement;
if (!["light", "dark"].includes(root.dataset.theme)) {
  root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

document.addEventListener("DOMContentLoaded", () => {
  // A page in a folder may not read its neighbours, so results come without an excerpt of each.
  if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;

  // Who closes a drawer goes on at the button that opened it.
  for (const side of ["primary", "secondary"]) {
    document.getElementById(`pst-${side}-sidebar-modal`)?.addEventListener("close", () => {
      [...document.querySelectorAll(`button.${side}-toggle`)].find(button => button.checkVisibility())?.focus();
    });
  }

  // An arrow in the table of contents says what it opens.
  for (const arrow of document.querySelectorAll(".bd-sidebar summary")) {
    const page = arrow.closest("li")?.querySelector("a")?.textContent.trim();
    arrow.setAttribute("aria-label", `Pages below ${page}`);
  }

  for (const tables of document.querySelectorAll(".filtered")) addFilter(tables);
});

// A box above the tables of `.filtered`: rows that have all its words stay, and the studies that have such rows open.
function addFilter(tables) {
  const rows = [...tables.querySelectorAll("tbody tr")].map(row => ({ row, text: row.textContent.toLowerCase() }));
  const groups = [...tables.querySelectorAll("details")];
  const label = document.createElement("label"), box = document.createElement("input"), count = document.createElement("output");
  box.type = "search";
  box.placeholder = "gptq s-3bit";
  label.className = "filter";
  label.append("Rows with ", box, count);
  tables.prepend(label);
  box.addEventListener("input", () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const { row, text } of rows) row.hidden = !words.every(word => text.includes(word));
    for (const group of groups) {
      const left = group.querySelector("tbody tr:not([hidden])") !== null;
      group.hidden = !left;
      group.open = left && words.length > 0;
    }
    count.value = words.length ? ` ${rows.filter(({ row }) => !row.hidden).length} of ${rows.length}` : "";
  });
}
