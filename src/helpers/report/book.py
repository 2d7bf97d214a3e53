"""Build the book: published runs and, on pages of their own, this machine's local runs.

`build()` copies `book/` to `_build/stage`, adds what is computed there (numbers for the prose, tables, the pages of the
runs) and lets Jupyter Book build that copy, so that nothing tracked by git is ever written. Warnings are errors. The
new pages replace the old ones in `_build/html` only after a build without any.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pandas as pd
import yaml
from filelock import FileLock

from helpers import project, records, runs
from helpers.errors import UserError
from helpers.report import (
    clean,
    damage,
    during,
    findings,
    grading,
    lesson,
    long_tables,
    negative,
    numbers,
    pages,
    publish,
    quantizers,
    recovery,
    reliability,
    speed,
    table,
    verdicts,
)
from helpers.report.pages import Run

NO_LOCAL = "There are none yet. `lowbit run ptq -p bits=3` makes one, and the next `lowbit book` shows it here.\n"
JUPYTER_BOOK = "from jupyter_book.cli.main import main; main()"
MOST_SHOWN = 8  # problems printed when a build fails


class BookError(UserError):
    """The book did not build."""

    exit_code = 1


def build() -> Path:
    """Build the book and give its first page. Errors: `BookError` with the first problems that Sphinx reported."""
    home = project.root() / "_build"
    home.mkdir(exist_ok=True)
    with FileLock(home / ".book.lock"):
        stage(home / "stage")
        fresh = home / ".book"
        shutil.rmtree(fresh, ignore_errors=True)
        _sphinx(home / "stage", fresh)
        shutil.rmtree(home / "html", ignore_errors=True)
        os.rename(fresh / "_build" / "html", home / "html")
        shutil.rmtree(fresh, ignore_errors=True)
    return home / "html" / "index.html"


def stage(folder: Path) -> None:
    """Make `folder` a complete source of the book: everything in `book/`, and everything computed."""
    root = project.root()
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(root / "book", folder, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    # Jupyter Book would add every script below _static to every page; MathJax belongs on pages with formulas only.
    (folder / "_extra" / "_static").mkdir(parents=True)
    os.rename(folder / "_static" / "mathjax", folder / "_extra" / "_static" / "mathjax")

    shutil.copytree(root / lesson.FOLDER, folder / "class")

    known = [*_shipped(), *_published()]
    own = _local({run.result.run_id: run for run in known})
    toc = yaml.safe_load((folder / "_toc.yml").read_text())
    _write_run_pages(folder, toc, {run.page: run for run in known if run.page}, own)
    substitutions = _write_fragments(folder, known, own)
    (folder / "_toc.yml").write_text(yaml.safe_dump(toc, sort_keys=False, allow_unicode=True))

    config = yaml.safe_load((root / "_config.yml").read_text())
    config["parse"]["myst_substitutions"] = substitutions
    config["sphinx"]["config"]["html_extra_path"] = ["_extra"]
    (folder / "_config.yml").write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))


def _shipped() -> list[Run]:
    folders = [path.parent for path in sorted(project.SHIPPED.glob("*/result.json"))]
    return [
        Run(records.read(folder).model_copy(update={"name": folder.name}), f"runs/shipped/{folder.name}", folder)
        for folder in folders
    ]


def _published() -> list[Run]:
    book = project.root() / "book" / "runs"
    found = publish.published(book)
    paged = {name for name in found if (book / f"{name}.ipynb").is_file()}
    return [Run(result, f"runs/{name}" if name in paged else "", book / name) for name, result in found.items()]


def _local(known: dict[str, Run]) -> list[Run]:
    """Local runs; one with the id of a published run has that run's page, since it is the same experiment."""
    own = []
    for result in table.local():
        path = runs.done(result.run_id)
        page = f"local/{result.study}/{result.name or result.run_id}" if _can_be_shown(path / "run.ipynb") else ""
        twin = known.get(result.run_id)
        own.append(Run(result, twin.page if twin else page, path, local=True))
    return own


def _can_be_shown(notebook: Path) -> bool:
    """Plain papermill leaves no notebook in the run, and one that loads from another host has no place here."""
    return notebook.is_file() and clean.problem(clean.read(notebook)) is None


def _write_run_pages(folder: Path, toc: dict, shown: dict[str, Run], own: list[Run]) -> None:
    """Write every run's page; those that the table of contents lacks go below Results and Your local runs."""
    chapters = [chapter for part in toc["parts"] for chapter in part["chapters"]]
    listed = {chapter["file"] for chapter in chapters}
    for name in sorted(listed - shown.keys()):
        if name.startswith("runs/"):
            title = next(chapter["title"] for chapter in chapters if chapter["file"] == name)
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.md").write_text(pages.not_run(title, f"lowbit study {numbers.STUDY}"))
    new = [run for run in own if run.page and run.page not in shown]
    for run in [*shown.values(), *new]:
        _write_run_page(folder, run, label="" if run.page in listed else run.label)
    for parent, below in (("results", shown.values()), ("local", new)):
        if sections := _by_study(folder, [run for run in below if run.page not in listed]):
            next(chapter for chapter in chapters if chapter["file"] == parent)["sections"] = sections


def _by_study(folder: Path, found: list[Run]) -> list[dict]:
    """Entries of the table of contents: a page for each study, which lists its runs, with their pages below it."""
    studies: dict[str, list[Run]] = {}
    for run in found:
        studies.setdefault(run.page.rpartition("/")[0], []).append(run)
    for page, own in studies.items():
        (folder / f"{page}.md").write_text(pages.runs_of(page.rpartition("/")[2], own))
    return [
        {"file": page, "sections": [{"file": run.page, "title": run.label} for run in own]}
        for page, own in studies.items()
    ]


def _write_run_page(folder: Path, run: Run, label: str) -> None:
    files = folder / run.page
    files.mkdir(parents=True, exist_ok=True)
    names = [name for name in publish.COPIED if (run.path / name).is_file()]
    for name in names:
        shutil.copyfile(run.path / name, files / name)
    published = folder / f"{run.page}.ipynb"
    notebook = clean.read(published if published.is_file() else run.path / "run.ipynb")
    if reason := clean.problem(notebook):
        raise BookError(f"{run.label} cannot be shown: {reason}.")
    notebook = clean.clean(notebook)
    head = pages.header(run, names)
    if template := project.templates().get(run.result.stage):
        notebook = lesson.with_prose(notebook, template)
        head += "" if label else f"\n\n{lesson.buttons(run.result.stage)}"
    notebook = pages.with_header(notebook, head, label)
    nbformat.write(pages.with_alt(notebook), published)


def _write_fragments(folder: Path, known: list[Run], own: list[Run]) -> dict[str, str]:
    """Write what the chapters include; give what they substitute."""
    published = [run for run in known if not run.page.startswith("runs/shipped/")]
    df = table.rows([run.result for run in published])
    results = [run.result for run in published]
    by_id = {
        run.result.run_id: run for run in sorted(known, key=lambda run: bool(run.page))
    }  # of twins, one with a page
    local_df = table.rows([run.result for run in own])
    own_by_id = {run.result.run_id: run for run in own}
    has_figure = (folder / "results" / "pareto.svg").is_file()
    measured = speed.read(folder / "results" / "speed.json")
    in_csv = (folder / "results" / "verdicts.csv").is_file()
    papers = [findings.paper_1(df, results), findings.paper_2(results)]
    judged = pd.concat(papers)

    texts = {
        "pareto": pages.pareto("results/pareto", pages.PARETO_ALT, pages.pareto_caption(df, numbers.STUDY))
        if has_figure
        else pages.NOTHING,
        "results": long_tables.results(df[[bool(by_id[run_id].page) for run_id in df["run_id"]]], by_id),
        **{f"scores-{study}": pages.scores(df, by_id, study) for study in {*df["study"], numbers.STUDY, "sizes"}},
        "local-rows": long_tables.results(local_df, own_by_id) if len(local_df) else "None on this machine.\n",
        "local": _local_text(folder, own, local_df, by_id),
        **{f"methods-{size}": quantizers.methods(df, size, by_id) for size in numbers.SIZES},
        "damage": damage.by_kind(df, by_id),
        "survival": damage.survival(results),
        "arms": verdicts.arms_page(df),
        "arms-rewards": during.rewards(df),
        "limits": during.limits(df),
        **{name: recovery.cells(df, found) for name, found in during.BEYOND.items()},
        "grpo-settings": pages.source(project.PACKAGE / "training" / "grpo.py", "return GRPOConfig("),
        "grpo-group": during.advantages(),
        "arms-ends": during.ends(df),
        "speed-kd": speed.measurements(measured, "KD"),
        "speed-all": speed.measurements(measured),
        "speed-missed": speed.missed(measured),
        "speed-devices": speed.devices(measured),
        "speed-tests": speed.tests(folder / "results" / "kernel-tests.json"),
        "sticky": during.sticky(results),
        "verdicts": verdicts.verdict_page(papers[0], in_csv),
        "findings": verdicts.verdict_page(papers[1], in_csv),
        "negative": negative.contradicted(judged),
        "negative-counts": negative.counts(judged),
        "kills": reliability.kills(folder / "results" / "faults.csv"),
        "kills-outcome": reliability.outcome(folder / "results" / "faults.csv"),
        "load": reliability.load(folder / "results" / "load.csv"),
        "recovery-bits": recovery.by_bits(df),
        "recovery-rl": recovery.rl_effects(df),
        "recovery-kept": recovery.kept(df),
        "recovery-order": recovery.order(df),
        "recovery-simulated": recovery.simulated(df),
        **{f"recovery-{name}": recovery.cells(df, found) for name, found in recovery.TABLES.items()},
        **{f"chart-{name}": pages.chart(folder, name) for name in (*pages.CHARTS, *pages.SPEED_CHARTS)},
        **grading.rules(),
        "grading-benchmarks": grading.by_benchmark(folder / "results" / "grading.csv"),
        "grading-rewritings": grading.by_rewriting(folder / "results" / "grading.csv"),
        "crosscheck": quantizers.crosscheck(folder / "results" / "crosscheck.csv"),
        "status-runs": long_tables.status(published),
        "status-versions": pages.status_versions(known),
    }
    (folder / "_generated").mkdir()
    for name, text in texts.items():
        (folder / "_generated" / f"{name}.md").write_text(text)
    substitutions = numbers.numbers(df, lambda run_id: by_id[run_id].page)
    substitutions |= speed.numbers(measured)
    substitutions["pareto_downloads"] = pages.downloads("results/pareto", "results/results.csv") if has_figure else ""
    return substitutions


def _local_text(folder: Path, own: list[Run], df: pd.DataFrame, by_id: dict[str, Run]) -> str:
    if not own:
        return NO_LOCAL
    text = pages.local_table(own, {run_id: run.result for run_id, run in by_id.items()})
    (folder / "results").mkdir(exist_ok=True)
    for study, rows in df.groupby("study", sort=False):
        if not numbers.headline(rows, study).empty:
            stem, title = f"results/local-{study}", f"**Your local runs, study {study}.**"
            publish.draw(rows, folder / stem)
            caption = f"{title} {pages.pareto_caption(rows, study)}"
            text += "\n" + pages.pareto(stem, f"Your local runs. {pages.PARETO_ALT}", caption)
    return text


def _sphinx(source: Path, target: Path) -> None:
    """Run Jupyter Book on the staged source, in a process of its own because Sphinx changes the one it is in."""
    command = [sys.executable, "-c", JUPYTER_BOOK, "build", str(source), "--config", str(source / "_config.yml")]
    command += ["--path-output", str(target), "-W", "-n", "--keep-going", "-q"]
    environment = os.environ | {"NO_COLOR": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL)
    if done.returncode == 0:
        return
    lines = re.sub(r"\x1b\[[0-9;]*m", "", f"{done.stderr}\n{done.stdout}").replace(f"{source}/", "").splitlines()
    found = list(dict.fromkeys(line.strip() for line in lines if re.search(r"\b(WARNING|ERROR|CRITICAL)\b", line)))
    found = found or [line.strip() for line in lines if line.strip()][-1:]
    more = f"\n  ... and {len(found) - MOST_SHOWN} more" if len(found) > MOST_SHOWN else ""
    shown = "\n  ".join(found[:MOST_SHOWN])
    raise BookError(f"The book did not build; {len(found)} problem{'s' * (len(found) != 1)}:\n  {shown}{more}")
