"""The pages in a browser: headless Chromium opens the published book, from a server and from its folder.

Every chapter, every stage's page and one page of each other kind of run is visited once, on a phone 390 pixels wide; what a visit
finds is kept, and the tests ask about it. A machine without Chromium skips the file (`.ci/run` installs one).
"""

import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from urllib.parse import urljoin

import numpy as np
import pytest
import yaml
from PIL import Image
from playwright.sync_api import Error, sync_playwright

import synthetic_runs as synthetic
from browser import chromium

PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
BOOK = synthetic.CHECKOUT / "book"
OTHER_RUNS = ("diagnose/*", "policies/qlora", "speed-cpu/*")  # kinds of runs that are no chapter

pytestmark = pytest.mark.slow

# What one page shows: pictures, formulas, width, and contrast of its text in both colour schemes.
LOOK = (BOOK.parent / "tests" / "look.js").read_text()


@pytest.fixture(scope="module")
def browser():
    path = chromium()
    if path is None:
        pytest.skip("no Chromium here: `playwright install chromium`, or LOWBIT_CHROMIUM=/path/to/one")
    with sync_playwright() as p:
        try:
            browser = p.chromium.launch(executable_path=path)
        except Error as error:
            pytest.skip(f"{path} does not start: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_) -> None:
        pass


@pytest.fixture(scope="module")
def served(real) -> Iterator[str]:
    """The address of the published book on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=real))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture(params=["server", "folder"])
def address(request, real) -> str:
    """Where the book is: on a server, or in a folder that somebody opened."""
    return request.getfixturevalue("served") if request.param == "server" else f"{real.as_uri()}/"


@dataclass
class Visit:
    """What one page did and showed."""

    name: str
    problems: list[str] = field(default_factory=list)
    seen: dict = field(default_factory=dict)


def listen(page, home: str) -> list[str]:
    """The list that collects what goes wrong on `page` from now on."""
    problems: list[str] = []
    page.on("console", lambda m: problems.append(f"console: {m.text}") if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(f"error: {error}"))
    # a picture of the tab that is still on its way when the next page is opened is given up, which is no failure
    aborted = "net::ERR_ABORTED"
    page.on("requestfailed", lambda r: problems.append(f"failed: {r.url}") if r.failure != aborted else None)
    page.on("response", lambda r: problems.append(f"{r.status}: {r.url}") if r.status >= 400 else None)
    inside = (home, "data:", "blob:")
    page.on("request", lambda r: None if r.url.startswith(inside) else problems.append(f"elsewhere: {r.url}"))
    return problems


def settled(page) -> None:
    """Wait until the formulas are set and the fonts are there."""
    page.wait_for_function("!document.querySelector('script[src*=mathjax]') || window.MathJax?.startup?.promise")
    page.evaluate("async () => { await window.MathJax?.startup?.promise; await document.fonts.ready }")


def visited_pages(real: Path) -> list[str]:
    toc = yaml.safe_load((BOOK / "_toc.yml").read_text())
    chapters = [toc["root"], *(chapter["file"] for part in toc["parts"] for chapter in part["chapters"])]
    others = [sorted(real.glob(f"runs/{pattern}.html"))[0] for pattern in OTHER_RUNS]
    return [*(f"{name}.html" for name in chapters), *(str(path.relative_to(real)) for path in others), "search.html"]


@pytest.fixture(scope="module")
def visits(browser, served, real) -> list[Visit]:
    with browser.new_context(viewport=PHONE) as context:
        page = context.new_page()
        problems = listen(page, served)
        found = []
        for name in visited_pages(real):
            page.goto(served + name, wait_until="load")
            settled(page)
            found.append(Visit(name, list(problems), page.evaluate(LOOK)))
            problems.clear()
        return found


def wrong(visits: list[Visit], of: str) -> dict[str, list]:
    return {visit.name: visit.seen[of] for visit in visits if visit.seen[of]}


def test_pages_make_no_errors_and_ask_only_their_own_server(visits):
    assert {visit.name: visit.problems for visit in visits if visit.problems} == {}


def test_pictures_are_there(visits):
    assert wrong(visits, "broken") == {}
    assert sum(visit.seen["pictures"] for visit in visits) > 20


def test_formulas_are_set(visits):
    assert wrong(visits, "unset") == {}
    assert sum(visit.seen["formulas"] for visit in visits) > 100


def test_no_page_is_wider_than_a_phone(visits):
    assert wrong(visits, "wide") == {}


def test_text_can_be_read_in_both_colour_schemes(visits):
    assert wrong(visits, "faint") == {}
    assert all(visit.seen["texts"] > 5 for visit in visits)


def test_what_can_be_clicked_has_a_name(visits):
    assert wrong(visits, "nameless") == {}


@pytest.fixture
def page(browser):
    with browser.new_context(viewport=DESK) as context:
        yield context.new_page()


def test_search_finds_gptq(page, address):
    problems = listen(page, address)
    page.goto(f"{address}intro.html")
    page.keyboard.press("Control+k")
    page.keyboard.type("GPTQ")
    page.keyboard.press("Enter")
    page.wait_for_selector("#search-results li a")
    page.wait_for_function("document.querySelector('.search-summary')?.textContent.includes('found')")
    found = page.eval_on_selector_all("#search-results li > a", "links => links.map(link => link.href)")
    assert any("background/gptq.html" in link for link in found)
    assert len(found) > 5
    assert problems == []


def test_formulas_and_figures_work_where_the_book_is(page, address):
    problems = listen(page, address)
    for name in ("background/gptq.html", "intro.html"):
        page.goto(address + name)
        settled(page)
        seen = page.evaluate(LOOK)
        assert not seen["broken"] + seen["unset"]
    page.goto(f"{address}background/gptq.html")
    settled(page)
    assert page.locator("mjx-container").count() > 5
    loaded = page.evaluate("[...document.fonts].filter(f => f.status == 'loaded').map(f => f.family)")
    assert any(name.startswith("MJX") for name in loaded)
    assert problems == []


def test_the_first_page_leads_on(page, address):
    page.goto(f"{address}index.html")
    page.wait_for_url("**/intro.html")


def test_pages_can_be_read_without_scripts(browser, address):
    with browser.new_context(viewport=DESK, java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(f"{address}intro.html")
        assert page.locator("figure.only-light:visible").count() > 0
        assert page.locator("figure.only-dark:visible").count() == 0
        page.goto(f"{address}results.html")
        page.locator(".filtered summary").first.click()
        assert page.locator(".filtered tbody tr").first.is_visible()


def background(page) -> float:
    """How light the page's ground is, 0 to 255."""
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 3


def test_the_switch_makes_pages_dark_and_they_stay_so(page, address):
    page.emulate_media(color_scheme="light")
    page.goto(f"{address}intro.html")
    assert background(page) > 200
    switch = page.locator(".theme-switch-button:visible").first
    for _ in range(3):  # automatic, light, dark
        if page.locator("html").get_attribute("data-mode") == "dark":
            break
        switch.click()
    assert background(page) < 60
    assert page.locator("figure.only-light:visible").count() == 0
    assert page.locator("figure.only-dark:visible").count() > 0
    page.goto(f"{address}results.html")
    assert background(page) < 60


def test_the_system_can_ask_for_dark_pages(page, served):
    page.emulate_media(color_scheme="dark")
    page.goto(f"{served}intro.html")
    assert background(page) < 60


def test_pictures_of_notebooks_have_light_ink_on_dark_pages(page, served):
    lightness = {}
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.goto(f"{served}runs/micro/gptq-s-3bit.html")
        picture = page.locator(".cell_output img").first.screenshot()
        shades = np.asarray(Image.open(BytesIO(picture)).convert("L"))
        lightness[scheme] = np.quantile(shades, [0.01, 0.5, 0.99])
    darkest, ground, _ = lightness["light"]
    assert darkest < 100 < 200 < ground
    _, ground, lightest = lightness["dark"]
    assert ground < 80 < 150 < lightest


AT_REST = "document.getAnimations().every(animation => animation.playState !== 'running')"
FOCUS = """() => {
  const at = document.activeElement, style = getComputedStyle(at);
  const box = (at.offsetHeight ? at : at.firstElementChild ?? at).getBoundingClientRect();
  return {id: at.id, name: at.className, href: at.getAttribute('href') || '', tag: at.tagName,
          seen: box.width > 0 && box.height > 0 && box.bottom > 0 && box.top < innerHeight,
          marked: style.outlineStyle !== 'none' || style.boxShadow !== 'none', main: at.closest('main') !== null}
}"""


def test_the_keyboard_reaches_everything_and_shows_where_it_is(page, served):
    page.goto(f"{served}intro.html")
    stops = []
    for _ in range(150):
        page.keyboard.press("Tab")
        page.wait_for_function(AT_REST)
        stops.append(page.evaluate(FOCUS))
        if stops[-1]["main"] and stops[-1]["tag"] == "A" and "runs/" in stops[-1]["href"]:
            break
    assert stops[0]["href"] == "#main-content"  # the skip link
    assert [stop for stop in stops if not (stop["marked"] and stop["seen"])] == []
    assert any("search" in stop["name"] for stop in stops)
    assert any("theme-switch" in stop["name"] for stop in stops)
    assert any(stop["href"].endswith("speed.html") for stop in stops)  # the table of contents
    assert stops[-1]["main"]


def test_what_can_be_clicked_on_a_desk_has_a_name(page, served):
    page.goto(f"{served}results.html")
    assert page.evaluate(LOOK)["nameless"] == []


def test_a_filter_opens_the_rows_with_its_words(page, address):
    page.goto(f"{address}results.html")
    tables = page.locator(".filtered").first
    box, rows = tables.locator("input"), tables.locator("tbody tr")
    assert rows.locator("visible=true").count() == 0  # the studies are closed
    box.fill("GPTQ kd-s-2bit")
    shown = [row.lower() for row in rows.locator("visible=true").all_text_contents()]
    assert shown
    assert all("gptq" in row and "kd-s-2bit" in row for row in shown)
    assert tables.locator("output").text_content() == f" {len(shown)} of {rows.count()}"
    box.fill("no such row")
    assert rows.locator("visible=true").count() == 0
    box.fill("")
    assert tables.locator("details:visible").count() == tables.locator("details").count()
    assert tables.locator("details[open]").count() == 0


def test_the_skip_link_leads_to_the_text(page, served):
    page.goto(f"{served}when.html")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate(FOCUS)["main"]


def test_the_drawer_of_a_phone_opens_and_closes_by_keyboard(browser, served):
    with browser.new_context(viewport=PHONE) as context:
        page = context.new_page()
        page.goto(f"{served}when.html")
        link = page.locator("nav.bd-links a[href='speed.html'], .bd-links__title ~ * a[href='speed.html']").first
        assert not link.is_visible()
        toggle = page.locator("button.primary-toggle:visible").first
        toggle.focus()
        page.keyboard.press("Enter")
        link.wait_for(state="visible")
        page.wait_for_function("document.activeElement.closest('dialog') !== null")
        page.keyboard.press("Escape")
        link.wait_for(state="hidden")
        assert page.evaluate("document.activeElement.className").count("primary-toggle")


def test_every_download_answers(served, real):
    asked = set()
    for path in sorted(real.rglob("*.html")):
        here = urljoin(served, str(path.relative_to(real)))
        links = [link for link in re.findall(r"<a [^>]*>", path.read_text()) if re.search(r"\bdownload\b", link)]
        asked |= {urljoin(here, re.search(r'href="([^"]+)"', link)[1]) for link in links}
    assert len(asked) > 100
    for url in sorted(asked):
        assert url.startswith(served)
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=10) as answer:
                assert int(answer.headers["Content-Length"]) > 0, url
        except urllib.error.HTTPError as error:
            pytest.fail(f"{url} answers {error.code}")
