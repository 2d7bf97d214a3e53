"""The book: built once from made-up runs, once from nothing, and once as it is published (built.py)."""

import re
from collections import Counter
from datetime import datetime, timedelta
from functools import lru_cache
from itertools import pairwise, zip_longest
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pandas as pd
import pytest
import yaml
from bs4 import BeautifulSoup
from scipy import stats

import built
import synthetic_runs as synthetic
from helpers import evaluation, models, project, quant, records
from helpers.evaluation.survival import survivals
from helpers.report import book, findings, lesson, numbers, pages, publish, recovery, speed, table

CHECKOUT = synthetic.CHECKOUT
BOOK = CHECKOUT / "book"
PROSE = sorted(BOOK.glob("*.md"))
LOADERS = {
    "script": ["src"],
    "img": ["src", "srcset"],
    "link": ["href"],
    "iframe": ["src"],
    "source": ["src", "srcset"],
    "video": ["src", "poster"],
    "audio": ["src"],
    "embed": ["src"],
    "object": ["data"],
}
ELSEWHERE = re.compile(r"^\s*(https?:)?//")
CSS_ELSEWHERE = re.compile(r"""(@import\s+|url\(\s*)["']?\s*(https?:)?//""")


@pytest.fixture(scope="module", params=["full", "empty", "real"])
def html(request):
    return request.getfixturevalue(request.param)


@lru_cache(maxsize=1)  # the tests of one book come one after the other
def soups(html):
    paths = [path for path in sorted(html.rglob("*.html")) if "_static" not in path.parts]
    return [(path, BeautifulSoup(path.read_text(), "html.parser")) for path in paths]


def article(soup):
    return soup.find("article") or soup  # the first page only leads on to intro.html


def text(html, page):
    return " ".join(
        BeautifulSoup((html / f"{page}.html").read_text(), "html.parser").find("article").get_text().split()
    )


@pytest.mark.slow
def test_no_page_loads_anything_from_another_host(html):
    for path, soup in soups(html):
        for tag, attributes in LOADERS.items():
            for node in soup.find_all(tag):
                for attribute in attributes:
                    assert not ELSEWHERE.search(node.get(attribute, "")), f"{path.name}: {node}"
        styles = [node.get_text() for node in soup.find_all("style")] + [n["style"] for n in soup.find_all(style=True)]
        assert not CSS_ELSEWHERE.search(" ".join(styles)), path.name
        scripts = " ".join(node.get_text() for node in soup.find_all("script"))
        assert not re.search(r"""["']https?://""", scripts), path.name
    for path in html.rglob("*.css"):
        assert not CSS_ELSEWHERE.search(path.read_text()), path.name


@pytest.mark.slow
def test_every_link_inside_the_book_leads_somewhere(html):
    anchors = {path: {node["id"] for node in soup.find_all(id=True)} for path, soup in soups(html)}
    for path, soup in soups(html):
        links = [(node, node["href"]) for node in soup.find_all(["a", "link"], href=True)]
        links += [(node, node["src"]) for node in soup.find_all(["img", "script"], src=True)]
        for node, target in links:
            if re.match(r"(https?|mailto|data):", target):
                continue
            target, _, anchor = target.partition("#")
            there = (path.parent / target.partition("?")[0]).resolve() if target else path
            assert there.exists(), f"{path.name}: {node}"
            if anchor and there.suffix == ".html":
                assert unquote(anchor) in anchors[there], f"{path.name}: {node}"


@pytest.mark.slow
def test_links_to_other_hosts_are_well_formed(html):
    for path, soup in soups(html):
        for node in soup.find_all("a", href=re.compile("^[a-z]+:")):
            link = urlsplit(node["href"])
            assert link.scheme == "https", f"{path.name}: {node}"
            assert re.fullmatch(r"[\w-]+(\.[\w-]+)+", link.netloc), f"{path.name}: {node}"
            assert not re.search(r"[\s<>{}`]", node["href"]), f"{path.name}: {node}"


@pytest.mark.slow
def test_every_image_has_a_text(html):
    images = [(path, image) for path, soup in soups(html) for image in article(soup).find_all("img")]
    for path, image in images:
        alt = image.get("alt", "")
        assert alt.strip(), f"{path.name}: {image}"
        assert not alt.endswith((".png", ".svg")), f"{path.name}: {image}"


@pytest.mark.slow
def test_no_page_shows_an_error_or_an_open_substitution(html):
    for path, soup in soups(html):
        assert not soup.select(".traceback, .system-message, .problematic"), path.name
        words = article(soup).get_text().replace("{{ base_s }} {cite}", "")  # that is what a hostile run wrote
        assert not re.search(r"\{\{\s*\w+\s*\}\}", words), path.name  # {{The authors}} is BibTeX


@pytest.mark.slow
def test_what_a_model_wrote_is_text_in_every_page(full):
    pages = [(path, soup) for path, soup in soups(full) if "alert(1)" in path.read_text()]
    assert len(pages) >= 2  # the run's own page, and those with its row
    for path, soup in pages:
        for tag in article(soup).find_all(True):
            assert tag.name not in ("iframe", "object", "embed"), path.name
            assert not [name for name in tag.attrs if name.startswith("on")], path.name
            assert not str(tag.get("href", "")).strip().lower().startswith("javascript:"), path.name
            assert tag.name != "script" or "alert(1)" not in tag.get_text(), path.name
        assert "<script>alert(1)</script>" in article(soup).get_text(), path.name


@pytest.mark.slow
def test_every_page_of_the_table_of_contents_is_there(html):
    toc = yaml.safe_load((BOOK / "_toc.yml").read_text())
    for chapter in [{"file": toc["root"]}, *(c for part in toc["parts"] for c in part["chapters"])]:
        assert (html / f"{chapter['file']}.html").is_file()


@pytest.mark.slow
def test_maths_comes_from_the_book_itself(full):
    page = (full / "runs" / "micro" / "gptq-s-3bit.html").read_text()
    assert re.search(r'src="[./]*_static/mathjax/tex-mml-chtml\.js', page)
    assert "mathjax/tex-mml-chtml.js" not in (full / "status.html").read_text()  # no formula, no megabyte of script
    fonts = set(re.findall(r"MathJax_\w+(?:-\w+)?\.woff", (full / "_static/mathjax/tex-mml-chtml.js").read_text()))
    assert fonts <= {path.name for path in (full / "_static/mathjax/output/chtml/fonts/woff-v2").iterdir()}
    assert (full / "_static/mathjax/LICENSE").is_file()


QUOTED = [
    "40.0 % → 75.0 % is what RL in full precision does to model s",
    "4 bits is the lowest",
    "For the smaller xs: 8 bits and 8 bits",
    "3.0 points of accuracy",
    "from 1.51 MiB to 386 KiB",
    "At 3 bits the loss is 15.0 points by GPTQ and 15.0 points by RTN; at 2 bits 67.0 points and 67.0 points",
    "share of 500 held-out problems",
]


@pytest.mark.slow
def test_the_first_page_quotes_the_results(full):
    words = text(full, "intro")
    for quoted in QUOTED:
        assert quoted in words
    assert "not run yet" not in words
    soup = BeautifulSoup((full / "intro.html").read_text(), "html.parser")
    assert soup.find("a", string="75.0 %")["href"] == "runs/micro/eval-grpo-s.html"
    assert len(soup.select("figure.only-light img.only-light")) == 1
    assert len(soup.select("figure.only-dark img.only-dark")) == 1


@pytest.mark.slow
def test_run_pages_hide_the_parameters_and_name_the_command(full):
    words = text(full, "runs/micro/gptq-s-3bit")
    assert "lowbit run ptq -p parent=base-s" in words
    assert "parent: str" not in words
    soup = BeautifulSoup((full / "runs/micro/gptq-s-3bit.html").read_text(), "html.parser")
    assert "tag_hide-input" in str(soup)
    assert soup.select_one("img[alt='Reward against steps']")


@pytest.mark.slow
def test_local_rows_are_marked_and_stay_apart(full):
    soup = BeautifulSoup((full / "results.html").read_text(), "html.parser")
    scores, published, *local = soup.select(".table-scroll")
    assert published.parent.summary.text == "micro: 20 runs, 60 rows"
    assert len(scores.select("tbody tr")) == 20
    assert not scores.select(".local-tag")
    assert not published.select(".local-tag")
    assert len(published.select("tbody tr")) == 60
    assert [group.parent.summary.text for group in local] == ["micro: 20 runs, 60 rows", "local: 3 runs, 9 rows"]
    rows = [row for group in local for row in group.select("tbody tr")]
    assert rows
    assert all(row.select(".local-tag") for row in rows)
    words = text(full, "local")
    assert "mine local eval accuracy 0.700 not published" in words
    assert "grpo-s micro grpo – no metrics to compare" in words
    assert "all metrics equal" in words
    assert (full / "local/local/mine.html").is_file()
    assert not (full / "local/local/by-hand.html").exists()


@pytest.mark.slow
def test_every_row_has_the_command_that_makes_it(real):
    _, soup = next(found for found in soups(real) if found[0].name == "results.html")
    rows = soup.select(".filtered tbody tr")
    found = publish.published(BOOK / "runs")
    paged = {result.run_id for name, result in found.items() if (BOOK / "runs" / f"{name}.ipynb").is_file()}
    shown = table.rows([result for result in found.values() if result.run_id in paged])
    assert [row.select("td")[-1].get_text() for row in rows] == list(shown["command"])
    assert len(rows) > 900


@pytest.mark.slow
def test_the_runs_of_a_study_are_listed_on_its_page(full):
    soup = BeautifulSoup((full / "runs" / "micro.html").read_text(), "html.parser")
    rows = [row.a["href"] for row in soup.select(".table-scroll tbody tr")]
    pages_of_runs = {str(path.relative_to(full / "runs")) for path in (full / "runs" / "micro").glob("*.html")}
    toc = yaml.safe_load((BOOK / "_toc.yml").read_text())
    chapters = {f"{c['file'].removeprefix('runs/')}.html" for part in toc["parts"] for c in part["chapters"]}
    assert set(rows) == pages_of_runs - chapters
    assert "lowbit study micro" in text(full, "runs/micro")
    assert "No study asked for them" in text(full, "local/local")


@pytest.mark.slow
def test_the_page_of_a_run_says_what_lowbit_show_says(real, capsys):
    from helpers.cli import app

    for name, path in {"micro/grpo-s": "", "micro/gptq-s-3bit": "", "policies/qlora": "", "base-s": "shipped/"}.items():
        app(["show", name], standalone_mode=False)
        shown = {
            key: value
            for key, value in (
                line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line[0] != " "
            )
        }
        head = text(real, f"runs/{path}{name}")
        seconds, device = re.search(r"([\d.]+) s, (.+)", shown["made"]).groups()
        assert f"run {shown['run']}, {float(seconds):,.0f} s on {device}." in head
        assert shown["command"] in head
        if shown["parents"] != "none":
            assert f"Its parents: {shown['parents']}." in head
        assert f"lowbit show {name}" in head


@pytest.mark.slow
def test_the_status_page_counts_every_run(real):
    results = publish.published(BOOK / "runs")
    _, soup = next(found for found in soups(real) if found[0].name == "status.html")
    assert len(soup.select(".filtered tbody tr")) == len(results)
    counted = {
        row.td.get_text(): int(row.select("td")[1].get_text())
        for row in soup.select_one(".table-scroll").select("tbody tr")
    }
    assert counted == Counter(result.study for result in results.values())


@pytest.mark.slow
def test_lessons_open_elsewhere_once_there_is_a_repository(full, real):
    links = BeautifulSoup((full / "runs/micro/gptq-s-3bit.html").read_text(), "html.parser").find_all("a", href=True)
    opened = [link["href"] for link in links if re.search("colab|mybinder", link["href"])]
    slug, notebook = built.REPOSITORY.removeprefix("https://github.com/"), "notebooks/class/03_ptq.ipynb"
    assert opened == [
        f"https://colab.research.google.com/github/{slug}/blob/main/{notebook}",
        f"https://mybinder.org/v2/gh/{slug}/main?labpath={notebook}",
    ]
    page = (real / "runs/micro/gptq-s-3bit.html").read_text()
    assert ("colab" in page) == ("mybinder" in page) == bool(lesson.repository())


@pytest.mark.slow
def test_without_runs_the_book_says_so(empty):
    words = text(empty, "intro")
    assert words.count("not run yet") >= 8
    assert "Nothing has been published yet" in words
    assert not re.search(r"\d+\.\d %|\d points", words)
    assert "not published yet" in text(empty, "runs/micro/grpo-s")
    assert "There are none yet" in text(empty, "local")
    assert "None on this machine" in text(empty, "results")


@pytest.mark.slow
def test_a_failed_build_names_the_place_and_keeps_the_old_pages(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWBIT_HOME", str(tmp_path))
    monkeypatch.delenv("LOWBIT_RUNS", raising=False)
    synthetic.project(tmp_path)
    old = tmp_path / "_build" / "html"
    old.mkdir(parents=True)
    (old / "index.html").write_text("old")
    with (tmp_path / "book" / "status.md").open("a") as file:
        file.write("\n{{ a_number_that_nobody_computes }}\n")
    with pytest.raises(book.BookError, match=r"status\.md:\d+.*a_number_that_nobody_computes") as caught:
        book.build()
    assert "Traceback" not in str(caught.value)
    assert str(tmp_path) not in str(caught.value)
    assert (old / "index.html").read_text() == "old"


# --- without a build --------------------------------------------------------------------------------------------------


def frame(**accuracy) -> pd.DataFrame:
    """Rows of model s in the micro study: base, grpo, b8, b4, b3, b2."""
    recipes = {"base": "base", "grpo": "base > grpo"}
    arms = [
        {
            "study": "micro",
            "run_id": arm,
            "model": "s",
            "recipe": recipes.get(arm, "base > grpo > rtn"),
            "bits": 16 if arm in recipes else int(arm[1:]),
            "memory_bytes": 1000,
            "metric": "accuracy",
            "benchmark": "arithmetic",
            "value": value,
            "n": 500,
            "seed": 0,
        }
        for arm, value in accuracy.items()
    ]
    return pd.DataFrame(arms, columns=[*table.COLUMNS])


def test_numbers_say_not_run_yet_until_they_can_be_computed():
    nothing = numbers.numbers(frame())
    assert set(nothing.values()) == {numbers.NOT_RUN}
    some = numbers.numbers(frame(grpo=0.75, b4=0.72))
    assert some["grpo_s"] == "75.0 %"
    assert some["loss4_rtn_s"] == "3.0 points"
    assert some["fewest_bits_rtn_s"] == some["base_s"] == some["grpo_xs"] == numbers.NOT_RUN
    assert set(some) == set(nothing)


@pytest.mark.parametrize(
    ("b8", "b4", "b3", "b2", "fewest"),
    [
        (0.8, 0.8, 0.7, 0.1, "4 bits"),
        (0.8, 0.8, 0.77, 0.8, "2 bits"),
        (0.76, 0.7, 0.7, 0.1, "8 bits"),  # exactly 95 % is enough
        (0.75, 0.7, 0.7, 0.1, "none of 8, 4, 3, 2 bits"),
    ],
)
def test_fewest_bits(b8, b4, b3, b2, fewest):
    assert numbers.numbers(frame(grpo=0.8, b8=b8, b4=b4, b3=b3, b2=b2))["fewest_bits_rtn_s"] == fewest


def test_a_gain_is_called_a_gain_and_a_number_links_to_its_run():
    texts = numbers.numbers(frame(grpo=0.7, b8=0.712), page=lambda run_id: f"runs/{run_id}")
    assert texts["loss8_rtn_s"] == "{doc}`−1.2 points (a gain) </runs/b8>`"
    assert texts["grpo_s"] == "{doc}`70.0 % </runs/grpo>`"


def test_the_quoted_seed_is_the_lowest_one():
    later = frame(grpo=0.1).assign(seed=1)
    assert numbers.numbers(pd.concat([later, frame(grpo=0.7)]))["grpo_s"] == "70.0 %"


@pytest.mark.parametrize(("n_bytes", "shown"), [(512, "512 B"), (1_580_544, "1.51 MiB"), (395_136, "386 KiB")])
def test_memory(n_bytes, shown):
    assert numbers.memory(n_bytes) == shown


@pytest.mark.parametrize("path", PROSE, ids=lambda path: path.stem)
def test_prose_takes_its_numbers_from_the_results(path):
    prose = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL).replace("95 %", "")
    assert not re.search(r"\d+(?:\.\d+)?\s*(?:%|points|KiB|MiB)|\b0\.\d+", prose)


def test_prose_uses_only_numbers_that_are_computed():
    known = {*numbers.numbers(frame()), *speed.numbers([]), "pareto_downloads"}
    for path in PROSE:
        assert set(re.findall(r"\{\{\s*(\w+)\s*\}\}", path.read_text())) <= known


def test_every_chapter_is_in_the_table_of_contents_and_the_other_way_round():
    toc = yaml.safe_load((BOOK / "_toc.yml").read_text())
    files = {toc["root"], *(chapter["file"] for part in toc["parts"] for chapter in part["chapters"])}
    assert {path.stem for path in PROSE} == {file for file in files if not file.startswith(("runs/", "background/"))}


def first_difference(published, made):
    """(line number, published, made) where two tables part. pytest's own comparison of megabytes takes hours."""
    lines = zip_longest(published.splitlines(), made.splitlines())
    return next(((n, *pair) for n, pair in enumerate(lines, start=1) if pair[0] != pair[1]), None)


def test_published_results_are_what_the_published_runs_say():
    path = BOOK / "results" / "results.csv"
    if not path.is_file():
        pytest.skip("nothing is published yet")
    made = publish.as_csv(table.rows(publish.published(BOOK / "runs").values()))
    assert first_difference(path.read_text(), made) is None
    ids = {result.run_id for result in publish.published(BOOK / "runs").values()}
    ids |= {publish.records.read(path.parent).run_id for path in project.SHIPPED.glob("*/result.json")}
    for name, result in publish.published(BOOK / "runs").items():
        assert set(result.parents) <= ids, f"{name} was made from a run that is not published"


def test_a_figure_without_a_comment_is_named_by_its_heading():
    notebook = synthetic.executed(Path("/nowhere"), "title")
    notebook.cells[-1].source = "figure"
    cell = pages.with_alt(notebook).cells[-1]
    assert cell.metadata["mystnb"]["image"]["alt"] == "Figure of the section A picture"


def test_what_the_prose_says_of_the_four_sizes_is_so():
    rows = pd.read_csv(BOOK / "results" / "results.csv")
    rows = rows[(rows["study"] == "sizes") & (rows["metric"] == "accuracy") & (rows["benchmark"] == rows["task"])]
    by = {(row.model, row.recipe, row.task): row for row in rows.itertuples()}
    base = {size: by[size, "base", "arithmetic"] for size in ("xs", "s", "m", "l")}
    trained = {size: by[size, "base > grpo", "arithmetic"] for size in base}
    for size in base:
        assert 0.1 < base[size].value < 0.6
        assert trained[size].ci_low > base[size].ci_high + 0.2
        assert trained[size].reply_tokens > 3 * base[size].reply_tokens
    assert trained["m"].value < trained["s"].value < trained["l"].value
    made = [records.read(path) for path in BOOK.glob("runs/sizes/*/result.json")]
    parents = {parent for result in made for parent in result.parents}
    shipped = [records.read(path) for path in project.SHIPPED.glob("*/result.json")]
    made += [result for result in shipped if result.run_id in parents]
    begun = [datetime.fromisoformat(result.started) for result in made]
    ended = [start + timedelta(seconds=result.timings["wall_s"]) for start, result in zip(begun, made, strict=True)]
    assert abs(max(ended) - min(begun) - timedelta(minutes=6)) < timedelta(seconds=30)


def test_what_the_pareto_exercise_says_is_so():
    rows = pd.read_csv(BOOK / "results" / "results.csv")
    rows = rows[(rows["study"] == "micro") & (rows["metric"] == "accuracy") & (rows["benchmark"] == "arithmetic")]
    by = {(row.model, row.recipe, row.bits): row for row in rows.itertuples()}
    full, low = by["xs", "base > grpo", 16], by["s", "base > grpo > rtn", 3]
    assert full.memory_bytes < 350 * 1024
    assert low.memory_bytes < 350 * 1024
    assert low.ci_low > full.ci_high


@pytest.fixture(scope="module")
def published():
    return pd.read_csv(BOOK / "results" / "results.csv")


@pytest.fixture(scope="module")
def arm(published):
    """Mean accuracy over seeds of an arm, published."""

    def mean(name, prefix="eval", task="arithmetic"):
        found = recovery.accuracies(published, name, prefix, task)
        assert len(found), name
        return found.mean()

    return mean


@pytest.fixture(scope="module")
def apart(published):
    """The 95 % interval of the difference of two arms, paired by seed."""

    def interval(first, second, prefix="eval"):
        d = (recovery.accuracies(published, first, prefix) - recovery.accuracies(published, second, prefix)).dropna()
        return stats.t.interval(0.95, len(d) - 1, d.mean(), stats.sem(d))

    return interval


def verdict(start):
    """The verdicts of the published claims that begin so."""
    found = pd.read_csv(BOOK / "results" / "verdicts.csv")
    return dict(found[found["claim"].str.startswith(start)][["claim", "verdict"]].itertuples(index=False))


def test_published_verdicts_are_what_the_published_runs_say():
    results = list(publish.published(BOOK / "runs").values())
    made = publish.as_csv(findings.all_verdicts(table.rows(results), results))
    assert first_difference((BOOK / "results" / "verdicts.csv").read_text(), made) is None


def test_what_part_one_says_of_the_arms_is_so(arm, apart):
    for size in ("xs", "s", "m", "l"):
        full = arm(f"arms/grpo-{size}")
        for low in (f"awq8-grpo-{size}", f"bnb8-grpo-{size}", f"qaft-{size}"):
            assert abs(arm(f"arms/{low}") - full) < 0.015
    for method, bits in (("rtn", 3), ("gptq", 3), ("rtn", 4), ("awq", 4)):
        lost = [arm(f"arms/grpo-{size}") - arm(f"arms/{method}{bits}-grpo-{size}") for size in ("s", "m", "l")]
        assert lost == sorted(lost, reverse=True)
    for adapted, full in (("qlora-m", "grpo-m"), ("qlora-l", "grpo-l"), ("lora-l", "grpo-l")):
        assert apart(f"arms/{adapted}", f"arms/{full}")[0] > 0
    assert apart("arms/qlora-xs", "arms/grpo-xs")[1] < 0
    assert verdict("8-bit QAFT is worse than RL in full precision (mean") == {
        "8-bit QAFT is worse than RL in full precision (mean over four sizes)": "no difference"
    }
    larger = list(verdict("A larger model at 4 bits").values())
    assert larger == ["holds", "inconclusive", "holds"]
    assert set(verdict("8-bit PTQ (AWQ) is about").values()) == {"holds"}


def test_what_part_one_says_of_shock_limits_and_few_bits_is_so(arm, apart):
    assert (
        verdict("Quantization shock: 20 steps at 8")[
            "Quantization shock: 20 steps at 8 bits in the middle of RL lower the final accuracy"
        ]
        == "no difference"
    )
    assert list(verdict("Quantization shock").values())[1:] == ["inconclusive", "holds"]
    assert apart("beyond/qaft3-all", "recover/rtn3-s")[0] > 0
    assert apart("beyond/qaft3-all", "recover/gptq3-s")[1] < 0
    assert apart("beyond/qaft2-all", "recover/gptq2-s")[1] < -0.15
    assert all(apart(f"beyond/qaft{b}-attention", f"beyond/qaft{b}-all")[0] > 0 for b in (3, 2))
    sizes = {name: layer.weight.numel() for name, layer in quant.linear_layers(models.load("base-s")[0]).items()}
    assert sum(n for name, n in sizes.items() if "self_attn" in name) / sum(sizes.values()) == pytest.approx(
        0.25, abs=0.03
    )
    full = arm("arms/grpo-s")
    assert arm("beyond/limit24") < 0.3
    assert full - 0.03 < arm("beyond/limit48") < full
    assert apart("beyond/qlora-lr0.0003", "arms/qlora-s")[0] > -0.005
    assert apart("beyond/qlora-lr0.01", "arms/qlora-s")[1] < 0


def test_what_part_two_says_of_bits_and_objectives_is_so(arm, apart):
    assert set(verdict("At 3 bits reasoning loses more").values()) == {"holds"}
    assert list(verdict("At 2 bits reasoning loses more").values()) == ["contradicted", "holds"]
    for method in ("gptq", "rtn"):
        lost = {
            task: arm("grpo-s", prefix, task) - arm(f"{method}3-s", prefix, task)
            for prefix, task in (("eval", "arithmetic"), ("recall", "recall"))
        }
        assert lost["arithmetic"] > 2 * lost["recall"]
    assert apart("kd2-s", "sft2-teacher-s")[0] > 0
    assert apart("kd2-tuned", "sft2-teacher-tuned")[0] > 0
    for other in (
        "sft2-gold-s",
        "kd2-reverse0.5-s",
        "kd2-reverse1.0-s",
        "kd2-onpolicy-s",
        "grids-step-s",
        "grids-learned-s",
    ):
        low, high = apart(other, "kd2-s")
        assert low < 0 < high


def test_what_part_two_says_of_starts_and_texts_is_so(arm, apart):
    ends = {init: [arm(f"init-{init}-lr{lr}-s") for lr in recovery.RATES] for init in recovery.INITS}
    best = {init: values.index(max(values)) for init, values in ends.items()}
    assert set(verdict("A GPTQ start").values()) == {"holds"}
    assert best["full"] < best["gptq"]
    assert apart(f"init-gptq-lr{recovery.RATES[0]}-s", f"init-full-lr{recovery.RATES[0]}-s")[0] < 0
    assert sum(a < b for a, b in zip(ends["rtn"], ends["full"], strict=True)) == len(recovery.RATES) - 1
    assert all(values[-1] < 0.51 for values in ends.values())
    assert apart("texts-traces-recall-s", "gptq2-s")[1] < 0
    assert apart("texts-recall-arithmetic-s", "texts-traces-arithmetic-s")[1] < 0
    assert abs(arm("texts-traces-corpus-s") - arm("texts-traces-arithmetic-s")) < 0.01
    amounts = [arm(name) for name in ("amount-100-s", "amount-400-s", "kd2-s", "amount-8000-s")]
    steps = [b - a for a, b in pairwise(amounts)]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] > 0
    assert apart("kd4-s", "gptq4-s")[1] < 0
    assert apart("kd3-s", "gptq3-s")[1] < 0.01
    lost = [arm(f"{name}4-s") - arm(f"{name}4-s", "w4a4kv4") for name in ("rtn", "gptq", "kd")]
    assert min(lost) > 3 * (arm("grpo-s") - arm("kd4-s"))
    assert apart("kd-w4a4kv4-s", "kd4-s", "w4a4kv4")[0] > 0


def test_what_the_follow_up_says_is_so(arm, apart, published):
    kept = {
        texts: (arm(f"followup/gptq2-{texts}"), arm(f"followup/gptq2-{texts}", "recall", "recall"))
        for texts in ("traces", "recall")
    }
    assert kept["recall"][1] > 0.99
    assert kept["recall"][0] < 0.5 * kept["traces"][0]
    assert kept["traces"][1] < 0.65
    assert apart("followup/kd3-lr0.001", "followup/gptq3")[0] > 0
    gain = arm("followup/kd3-lr0.001") - arm("followup/gptq3")
    assert gain > 0.4 * (arm("micro/grpo-s") - arm("followup/gptq3"))
    assert arm("followup/kd3-lr0.0001") < arm("followup/kd3-lr0.0003") < arm("followup/kd3-lr0.001")
    for lr in ("0.0001", "0.0003", "0.001"):
        low, high = apart(f"followup/kd4-lr{lr}", "followup/gptq4")
        assert low < 0 < high or abs(low + high) / 2 < 0.01
    before = arm("followup/kd-s-2bit")
    assert before - 0.03 < arm("followup/rl-lr0.001") < before
    assert arm("followup/rl-lr0.003") < before - 0.15
    for lr in ("0.001", "0.003"):
        assert abs(arm(f"followup/zerorl-lr{lr}") - arm("followup/gptq-s-2bit")) < 0.02
    moved = [
        recovery.accuracies(published, f"followup/zerorl-lr{lr}", "", "training", "train_codes_moved")
        for lr in ("0.001", "0.003")
    ]
    assert moved[0].max() < 1e-4 < moved[1].min()


def test_what_the_workflow_page_says_is_so(arm, apart, published):
    assert set(verdict("The workflow recovers more than half").values()) == {"holds"}
    assert all(apart(f"rl-kd2-{size}", f"kd2-{size}")[0] < 0.01 for size in ("s", "xs"))
    assert apart("rl-kd3-s", "gptq3-s")[1] > 0 > apart("rl-kd3-s", "gptq3-s")[0]
    moved = {
        name: recovery.accuracies(published, name, "", "training", "train_codes_moved").max()
        for name in ("zerorl2-s", "zerorl2-xs", "rl-kd2-s", "rl-first2-s")
    }
    assert moved["zerorl2-s"] == moved["zerorl2-xs"] == 0
    assert 0 < moved["rl-kd2-s"] < 0.01
    assert moved["rl-first2-s"] < 0.01
    for size, most in (("s", 0.015), ("xs", 0.03)):
        model = models.load(f"base-{size}")[0]
        on_grid = sum(layer.weight.numel() for layer in quant.linear_layers(model).values())
        assert 1 - on_grid / models.count_parameters(model) < most
    assert apart("zerorl3-s", "rl-kd3-s")[1] > 0
    low, high = apart("rl-first2-s", "rl-kd2-s")
    assert low < 0 < high
    assert arm("first2-s") < 0.3
    assert set(verdict("RL after KD cuts entropy").values()) == {"holds"}
    assert "holds" not in verdict("RL after KD raises accuracy").values()


def test_what_the_prose_says_of_reasoning_and_recall_is_so():
    rows = pd.read_csv(BOOK / "results" / "results.csv")
    rows = rows[(rows["study"] == "micro") & (rows["metric"] == "accuracy") & (rows["benchmark"] == rows["task"])]
    full = rows[rows["recipe"] == "base > grpo"].set_index(["model", "task"])["value"]
    low = rows[rows["method"] == "rtn"].set_index(["model", "task", "bits"])["value"]
    for model in ("xs", "s"):
        for bits in (3, 2):
            kept = {task: low[model, task, bits] / full[model, task] for task in ("arithmetic", "recall")}
            assert kept["recall"] > kept["arithmetic"]
    assert low["s", "recall", 3] > 0.95 * full["s", "recall"]
    assert low["s", "arithmetic", 3] < 0.85 * full["s", "arithmetic"]
    assert low["s", "arithmetic", 2] < 0.25 * full["s", "arithmetic"]


def accuracies(model):
    """(method, bits) -> accuracy on arithmetic of the micro study; full precision is ("grpo", 16)."""
    rows = pd.read_csv(BOOK / "results" / "results.csv")
    rows = rows[(rows["study"] == "micro") & (rows["metric"] == "accuracy") & (rows["benchmark"] == "arithmetic")]
    rows = rows[rows["model"] == model]
    return {(row.method, row.bits): row.value for row in rows.itertuples()}


def test_what_the_prose_says_of_the_quantizers_is_so():
    found = [r for name, r in publish.published(BOOK / "runs").items() if name.startswith("micro/eval-")]
    compared = evaluation.comparisons(found, "arithmetic").reset_index()
    noise = {
        (r["model"], r["step"].rpartition(" > ")[2], r["scheme"])
        for _, r in compared.iterrows()
        if r["verdict"] == "noise"
    }
    for model in ("xs", "s"):
        assert {(model, method, "w8g64") for method in ("rtn", "gptq", "awq")} | {(model, "bnb", "int8")} <= noise
        assert (model, "gptq", "w4g64") in noise
        value = accuracies(model)
        for bits in (3, 2):
            assert value["gptq", bits] > value["awq", bits] > value["rtn", bits]
        assert value["bnb", 4] <= value["gptq", 4]
    assert {("s", method, "w4g64") for method in ("rtn", "awq", "autoawq")} <= noise
    lost = {
        ("xs", "rtn", "w4g64"),
        ("xs", "awq", "w4g64"),
        *((m, "bnb", "nf4") for m in ("xs", "s")),
        ("xs", "autoawq", "w4g64"),
    }
    assert not lost & noise
    assert not {scheme for _, _, scheme in noise} & {"w3g64"}
    value = accuracies("s")
    full = value["grpo", 16]
    assert 2.5 < (full - value["rtn", 3]) / (full - value["gptq", 3]) < 3.5
    gain = value["grpo", 16] - value["base", 16]
    left = {method: (value[method, 2] - value["base", 16]) / gain for method in ("gptq", "awq", "rtn")}
    assert left["gptq"] > 0.5 > 0.25 > left["awq"] > 0 > left["rtn"]
    value = accuracies("xs")
    assert all(value[method, 2] < value["base", 16] for method in ("gptq", "awq", "rtn"))


def test_the_errors_of_the_layers_are_in_the_order_that_the_prose_gives():
    rows = pd.read_csv(BOOK / "results" / "results.csv")
    rows = rows[(rows["study"] == "micro") & (rows["metric"] == "output_error")]
    errors = {(row.model, row.method, row.bits): row.value for row in rows.itertuples()}
    for model in ("xs", "s"):
        for bits in (4, 3, 2):
            assert errors[model, "gptq", bits] < errors[model, "awq", bits] < errors[model, "rtn", bits]


def test_what_the_prose_says_of_the_policies_is_so():
    rows = pd.read_csv(BOOK / "results" / "results.csv")
    rows = rows[(rows["study"] == "arms") & (rows["metric"] == "accuracy") & (rows["benchmark"] == "arithmetic")]
    mean = rows.groupby(["recipe", "model", "bits"])["value"].mean()
    for model in ("xs", "s"):
        assert abs(mean["base > qaft", model, 8] - mean["base > grpo", model, 16]) < 0.01
        assert abs(mean["base > grpo > awq", model, 8] - mean["base > grpo", model, 16]) < 0.01
    made = {n: r for n, r in publish.published(BOOK / "runs").items() if n.startswith("sticky/")}
    reward = {}
    for name, result in made.items():
        arm, _, rate = name.removeprefix("sticky/").partition("-lr")
        reward[arm, float(rate)] = next(m.value for m in result.metrics if m.metric == "train_reward")
    for (arm, rate), value in reward.items():
        assert abs(value - reward["full", rate]) < 0.02, (arm, rate)
    assert reward["full", 3e-4] > 2 * reward["full", 3e-6]


def test_what_the_prose_says_of_the_cross_check_is_so():
    rows = pd.read_csv(BOOK / "results" / "crosscheck.csv")
    rows["ratio"] = rows["layer_error_ours"] / rows["layer_error_peer"]
    assert rows["ratio"].max() < 1.02
    low = rows[rows["scheme"].isin(["w4g64", "w3g64", "w2g64"])]
    assert low[low["method"].isin(["gptq-clip", "awq"])]["ratio"].max() < 0.96
    awq = rows[(rows["method"] == "awq") & (rows["scheme"] == "w3g64") & (rows["peer"] == "AutoAWQ")].iloc[0]
    assert awq["perplexity_ours"] > awq["perplexity_peer"]
    slower = rows[rows["seconds_ours"] > rows["seconds_peer"]]
    assert set(slower["peer"]) <= {"torchao", "llm-compressor RTN", "llm-compressor GPTQ"}
    level = rows[(rows["peer"] == "llm-compressor GPTQ")]
    assert (level["seconds_ours"] / level["seconds_peer"]).between(0.5, 1.5).all()


def test_what_the_prose_says_of_the_damage_is_so():
    rows = pd.read_csv(BOOK / "results" / "results.csv")
    rows = rows[rows["stage"] == "diagnose"]
    assert rows["run_id"].nunique() == 3
    for _, own in rows.groupby("run_id"):
        value = {(row.metric, row.benchmark): row.value for row in own.itertuples()}
        for kind in ("operators", "structure"):
            assert value["kl", "arithmetic/digits"] > 3 * value["kl", f"arithmetic/{kind}"]
        assert value["parted", "arithmetic/digits"] > 0.9
        alone = {benchmark: v for (metric, benchmark), v in value.items() if metric == "kl_alone"}
        layers = [v for benchmark, v in alone.items() if "." in benchmark]
        assert len(layers) == 28
        assert sum(layers) < 0.9 * alone["arithmetic"]
    names = {result.run_id: name for name, result in publish.published(BOOK / "runs").items()}
    blocks = rows[(rows["metric"] == "kl_alone") & rows["benchmark"].str.fullmatch(r"arithmetic/\d")]
    for run_id, own in blocks.groupby("run_id"):
        if "gptq" in names[run_id]:
            assert own.loc[own["value"].idxmax(), "benchmark"] == "arithmetic/3"
    chosen = "study == 'micro' and metric == 'boxed' and benchmark == 'arithmetic' and bits == 2"
    boxed = pd.read_csv(BOOK / "results" / "results.csv").query(chosen)
    boxed = boxed.set_index(["model", "method"])["value"]
    assert boxed["s", "gptq"] > 0.99
    assert boxed["xs", "rtn"] < 0.3
    found = [r for name, r in publish.published(BOOK / "runs").items() if name.startswith("micro/eval-")]
    left = survivals(found, "arithmetic").reset_index()
    moved = [
        m.value
        for name, result in publish.published(BOOK / "runs").items()
        for m in result.metrics
        if name.startswith("arms/qaft4-s") and m.metric == "train_codes_moved"
    ]
    assert len(moved) == 3
    assert 0.08 < min(moved) <= max(moved) < 0.12
    four = left[left["scheme"].isin(["w4g64", "nf4"])]
    assert len(four) == 10
    assert four["survival"].astype(float).min() > 0.7
    three = left[left["scheme"] == "w3g64"].set_index(["model", "recipe"])["survival"].astype(float)
    for method in ("rtn", "awq", "gptq"):
        assert three["xs", f"base > grpo > {method}"] < three["s", f"base > grpo > {method}"]
