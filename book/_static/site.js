// What the theme leaves open: the colours of a first visit, and search in a book opened from a folder.
"use strict";

// Before anything is drawn: a page whose scheme is "auto" has that of the system.
const root = document.documentElement;
if (!["light", "dark"].includes(root.dataset.theme)) {
  root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

document.addEventListener("DOMContentLoaded", () => {
  // A page in a folder may not read its neighbours, so results come without an excerpt of each.
  if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
});
