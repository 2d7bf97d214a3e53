// What tests/test_site.py asks about the page that it is on.
() => {
  const text = node => (node.textContent || "").trim().replace(/\s+/g, " ").slice(0, 40);
  const name = node => `${node.tagName.toLowerCase()}.${[...node.classList].join(".")} "${text(node)}"`;
  const shown = node => node.checkVisibility({ visibilityProperty: true, opacityProperty: true });
  const found = { broken: [], unset: [], wide: [], faint: [], nameless: [] };

  const pictures = [...document.images];
  found.broken = pictures.filter(image => !(image.complete && image.naturalWidth)).map(image => image.src);

  const formulas = [...document.querySelectorAll(".math")];
  found.unset = formulas.filter(node => !node.querySelector("mjx-container")).map(name);
  found.unset.push(...[...document.querySelectorAll("mjx-merror, [data-mjx-error]")].map(name));

  // The page itself must not scroll sideways, and nothing may stick out of the screen but inside a box that scrolls.
  const scrolls = node =>
    node.tagName !== "ARTICLE" && (/auto|scroll/.test(getComputedStyle(node).overflowX) || scrolls(node.parentElement));
  if (document.documentElement.scrollWidth > innerWidth) found.wide.push(`the page: ${document.documentElement.scrollWidth}`);
  for (const node of document.querySelectorAll("article *")) {
    const box = node.getBoundingClientRect();
    if (node.closest("mjx-assistive-mml")) continue; // for screen readers, drawn nowhere
    if (box.width && box.right > innerWidth + 1 && shown(node) && !scrolls(node.parentElement)) found.wide.push(name(node));
  }

  // WCAG 2.1: contrast of text and its ground, over both colour schemes.
  const channels = colour => (colour.match(/[\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => {
    const part = v => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const over = (top, below) => [0, 1, 2].map(i => top[i] * (top[3] ?? 1) + below[i] * (1 - (top[3] ?? 1)));
  const ground = node => {
    if (!node) return [255, 255, 255];
    const own = channels(getComputedStyle(node).backgroundColor);
    return (own[3] ?? 1) === 1 ? own : over(own, ground(node.parentElement));
  };
  const texts = new Set();
  const walker = document.createTreeWalker(document.querySelector("main") || document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const parent = walker.currentNode.parentElement;
    if (walker.currentNode.data.trim() && !parent.closest("script, style, mjx-container, svg")) texts.add(parent);
  }
  const before = document.documentElement.dataset.theme;
  const quick = document.head.appendChild(document.createElement("style"));
  quick.textContent = "* { transition: none !important }";
  for (const theme of ["light", "dark"]) {
    document.documentElement.dataset.theme = theme;
    const seen = new Set(); // one element of each kind is enough
    for (const node of texts) {
      const style = getComputedStyle(node), below = ground(node);
      const key = [style.color, below, style.fontSize, style.fontWeight].join();
      if (seen.has(key) || !shown(node)) continue;
      seen.add(key);
      const [a, b] = [light(over(channels(style.color), below)), light(below)].sort((x, y) => y - x);
      const ratio = (a + 0.05) / (b + 0.05), size = parseFloat(style.fontSize);
      const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
      if (ratio < (large ? 3 : 4.5)) found.faint.push(`${theme} ${ratio.toFixed(2)} ${name(node)}`);
    }
  }
  document.documentElement.dataset.theme = before;
  quick.remove();

  const controls = [...document.querySelectorAll("a[href], button, input, summary, [role=button]")];
  const named = node => text(node) || node.getAttribute("aria-label") || node.title || node.placeholder || node.labels?.length
    || [...node.querySelectorAll("img")].some(image => image.alt);
  found.nameless = controls.filter(node => node.type !== "hidden" && shown(node) && !named(node)).map(node => node.outerHTML.slice(0, 120));

  return { ...found, pictures: pictures.length, formulas: formulas.length, texts: texts.size };
}
