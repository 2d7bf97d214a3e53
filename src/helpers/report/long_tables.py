"""Tables of a thousand rows: written as HTML, closed until somebody opens a study, with a box that filters them (site.js).

A Markdown table of this length costs the reader three times the bytes, for paragraphs and spans that nothing here needs, and
the build seconds. Everything that comes from a run is escaped.
"""

from collections.abc import Iterable, Sequence
from html import escape

import pandas as pd

from helpers.report import pages
from helpers.report.pages import Run

LOCAL = '<span class="local-tag">local</span> '
ROWS_HEADER = (
    *("run", "benchmark", "metric", "value [95 % interval]", "n × k", "memory", "bits (effective)", "scheme"),
    *("recipe", "model", "seed", "reply tokens", "seconds", "command"),
)
RUNS_HEADER = ("run", "seconds", "device", "environment", "commit", "day (UTC)")


def results(df: pd.DataFrame, runs: dict[str, Run]) -> str:
    """All rows of a results table, each with its run and its command; local ones carry a tag."""
    if df.empty:
        return pages.NOTHING
    studies = []
    for study, rows in df.groupby("study", sort=False):
        title = f"{study}: {_count(rows['run_id'].nunique(), 'run')}, {_count(len(rows), 'row')}"
        studies.append((title, [_row(row, runs[row["run_id"]]) for _, row in rows.iterrows()]))
    return _closed(ROWS_HEADER, studies)


def _row(row: pd.Series, run: Run) -> list[str]:
    return [
        (LOCAL if run.local else "") + _link(run),
        escape(pages.text(row["benchmark"])),
        escape(row["metric"]),
        pages.interval(row),
        f"{pages.number(row['n'])} × {pages.number(row['k'])}",
        pages.memory_shown(row),
        f"{pages.number(row['bits'])} ({pages.number(row['effective_bits'], 2)})",
        *(escape(pages.text(row[column])) for column in ("scheme", "recipe", "model")),
        pages.number(row["seed"]),
        pages.number(row["reply_tokens"], 1),
        pages.number(row["wall_s"]),
        f"<code>{escape(row['command'])}</code>",
    ]


def status(runs: Sequence[Run]) -> str:
    """A study a row: how many runs, where and how long; below it every run: when, where, how long, from which commit."""
    if not runs:
        return pages.NOTHING
    studies: dict[str, list[Run]] = {}
    for run in runs:
        studies.setdefault(run.result.study, []).append(run)
    summary = [
        [
            study,
            len(own),
            pages.number(_seconds(own)),
            *(", ".join(sorted({part(run) for run in own})) for part in _PARTS),
        ]
        for study, own in studies.items()
    ]
    closed = [(f"{study}: {_count(len(own), 'run')}", [_run(run) for run in own]) for study, own in studies.items()]
    return "\n".join(
        [
            pages.table(["study", "runs", "seconds", "device", "environment", "day (UTC)"], summary),
            f"Together {_count(len(runs), 'run')} and {_seconds(runs):,.0f} s. Each of them:\n",
            _closed(RUNS_HEADER, closed),
        ]
    )


def _device(run: Run) -> str:
    return run.result.device


def _environment(run: Run) -> str:
    return f"Python {run.result.versions['python']}, torch {run.result.versions.get('torch', '–')}"


def _day(run: Run) -> str:
    return run.result.started[:10]


_PARTS = (_device, _environment, _day)


def _run(run: Run) -> list[str]:
    commit = f"<code>{escape(run.result.commit[:10])}</code>" + (
        ", with uncommitted changes" if run.result.dirty else ""
    )
    return [_link(run), f"{run.wall_s:,.0f}", escape(_device(run)), escape(_environment(run)), commit, _day(run)]


def _seconds(runs: Iterable[Run]) -> float:
    return sum(run.wall_s for run in runs)


def _count(number: int, of: str) -> str:
    return f"{number:,} {of}{'s' * (number != 1)}"


def _link(run: Run) -> str:
    label = escape(run.label)
    return f'<a href="{escape(run.page)}.html">{label}</a>' if run.page else f"<code>{label}</code>"


def _closed(header: Sequence[str], groups: Iterable[tuple[str, list[list[str]]]]) -> str:
    """One closed table a group. No line may be empty: that would end the HTML for the Markdown parser."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    lines = ['<div class="filtered">']
    for title, rows in groups:
        lines += [f"<details><summary>{escape(title)}</summary>", '<div class="table-scroll table-tall">']
        lines += [f'<table class="table"><thead><tr>{head}</tr></thead>', "<tbody>"]
        lines += ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows]
        lines += ["</tbody></table></div></details>"]
    return "\n".join([*lines, "</div>", ""])
