"""The parts of the book that are written by a program: tables, figures with captions, headers of run pages, in MyST.

Everything here is text in, text out; `book.py` decides what goes where.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd

from helpers.records import Result
from helpers.report.numbers import STUDY, headline, memory

NOT_MEASURED = "Not measured yet: `lowbit study speed`, then `lowbit publish speed`.\n"
NOTHING = "Nothing has been published yet: `make study`, then `lowbit publish micro`.\n"
PARETO_ALT = (
    "Accuracy against effective memory, one point a model, coloured by bits; the Pareto frontier is a step line"
)
CHARTS = {  # of `curves`: text for who cannot see it, caption
    "convergence": (
        "Accuracy against training step at three learning rates, one line for each start of training",
        "Distillation at 2 bits from four starts, model s: accuracy on 200 watched problems (calibration split, greedy) against "
        "steps. Lines are means over three training seeds, bands their range.",
    ),
    "low-bit-rl": (
        "Reward, reply length and entropy against RL step, with and without distillation before it",
        "RL of model s at 2 and 3 bits, straight after GPTQ (RL) and after distillation (KD, RL): each step's rollouts at "
        "temperature 1, running mean over five steps. Lines are means over three training seeds, bands their range.",
    ),
    "shock": (
        "Reward and entropy against RL step; fake quantization is on in the shaded steps",
        "RL of model s in full precision, fake-quantized to 8, 3 or 2 bits (groups of 64) in the shaded steps alone. Lines are "
        "means over three training seeds, bands their range.",
    ),
}
SPEED_CHARTS = {  # of `speed_figures` and `pareto_speed`
    "speed-roofline": (
        "Time of a linear layer against the bytes it moves, ours and other kernels, a panel for each number of input rows",
        "One linear layer of an 8B model, its weights not in the GPU's cache: time against the bytes that it has to move at least. "
        "On the line the device moves them as fast as it copies memory; nothing can lie below. Ours are stars, coloured by bits.",
    ),
    "speed-tokens": (
        "Decoded tokens a second against bits of a weight, a panel for each model or number of sequences",
        "Decoding with our engine: tokens a second over all sequences against the bits of a weight (packed below 16). Dotted: "
        "what reading every weight once a token would allow; micro models, one line a size, are too far below that to show it.",
    ),
    "speed-grpo": (
        "Time of one GRPO step by part, ours and the trainer with transformers' generate",
        "One GRPO step by part, on the same problems. Ours draws replies with the engine and computes log-probabilities of texts "
        "of like length together.",
    ),
    "pareto-speed": (
        "Accuracy against decoded tokens a second, coloured by bits, a panel for each number of sequences, with its frontier",
        "Accuracy on arithmetic after RL against decoding speed; the marker is the size, weights are packed below 16 bits. "
        "Accuracy: mean over training seeds with its 95 % interval (one seed: over problems), one greedy reply to each. "
        "Speed: median, our engine, the device of the [speed chapter](/speed.md). What lies below the frontier is faded.",
    ),
}
STUDIES = {  # what is no study, but listed like one
    "shipped": ("Base models that ship", "`lowbit run base` trains one."),
    "local": ("Runs of your own", "No study asked for them."),
}
MOST_PARENTS = 4  # named in the header of a run's page
VERSIONS_FIRST = ("python", "torch", "transformers", "trl", "numpy")
FIGURE = """```{{figure}} /{stem}{suffix}.svg
:class: only-{mode}
:figclass: only-{mode}
:alt: {alt}
:width: 100%

{caption}
```
"""
CAPTION = """\
Accuracy on {benchmark} against effective memory; models {model}; n = {n} problems, {decoding}; seeds: {seed}.
Bars are 95 % intervals over problems. Memory is that of the weights alone: packed codes with their scales and zero
points, plus what is not quantized; full precision counts two bytes a weight. Thin lines join the sizes of one arm; what lies
below the frontier is faded."""


@dataclass(frozen=True)
class Run:
    """A run that the book shows; `page` is a document name without suffix ("" for none), `path` holds its files."""

    result: Result
    page: str
    path: Path
    local: bool = False

    @property
    def label(self) -> str:
        """The run's name, with its study where that is not the book's main one."""
        name = self.result.name or self.result.run_id
        return name if self.result.study in (STUDY, "local") else f"{self.result.study}/{name}"

    @property
    def link(self) -> str:
        return f"{{doc}}`{self.label} </{self.page}>`" if self.page else f"`{self.label}`"

    @property
    def wall_s(self) -> float:
        return self.result.timings.get("wall_s", 0.0)


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], tall: bool = False) -> str:
    """A table in a box that scrolls by itself on a narrow screen."""
    lines = [_line(header), _line(["---"] * len(header)), *(_line(row) for row in rows)]
    return "\n".join([f"::::{{div}} table-scroll{' table-tall' if tall else ''}", *lines, "::::", ""])


def scores(df: pd.DataFrame, runs: dict[str, Run], study: str) -> str:
    """One row an evaluated model of a study: its accuracy over the whole task, and what it weighs."""
    rows = df[(df["study"] == study) & (df["metric"] == "accuracy") & (df["benchmark"] == df["task"])]
    rows = rows.sort_values(["task", "recipe", "params", "bits"], ascending=[True, True, True, False])
    header = [
        "model",
        "recipe",
        "scheme",
        "task",
        "accuracy [95 % interval]",
        "n",
        "reply tokens",
        "memory",
        "effective bits",
    ]
    lines = [
        [
            *(shown(row[column]) for column in ("model", "recipe", "scheme")),
            f"{{doc}}`{row['task']} </{page}>`" if (page := runs[row["run_id"]].page) else row["task"],
            interval(row),
            number(row["n"]),
            number(row["reply_tokens"], 1),
            memory_shown(row),
            number(row["effective_bits"], 2),
            number(row["params"]),
            number(row["seed"]),
        ]
        for _, row in rows.iterrows()
    ]
    return table([*header, "weights", "seed"], lines) if lines else NOTHING


def pareto(stem: str, alt: str, caption: str) -> str:
    """The figure in a light and a dark version; the theme shows one of them."""
    themes = {"light": "", "dark": "-dark"}
    return "\n".join(FIGURE.format(stem=stem, suffix=themes[m], mode=m, alt=alt, caption=caption) for m in themes)


def chart(folder: Path, name: str) -> str:
    """A figure of curves or of speed with its downloads, if it has been drawn."""
    if not (folder / "results" / f"{name}.svg").is_file():
        return NOT_MEASURED if name in SPEED_CHARTS else NOTHING
    files = {"its numbers (CSV)": "csv", "the figure (SVG)": "svg"}
    links = " · ".join(f"{{download}}`{text} </results/{name}.{ending}>`" for text, ending in files.items())
    return pareto(f"results/{name}", *(CHARTS | SPEED_CHARTS)[name]) + f"\nDownload: {links}\n"


def source(path: Path, start: str) -> str:
    """The statement of a module that begins with `start`, as code."""
    lines = path.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.strip().startswith(start))
    indent = len(lines[first]) - len(lines[first].lstrip())
    last = next(i for i in range(first + 1, len(lines)) if len(lines[i]) - len(lines[i].lstrip()) == indent)
    code = "\n".join(line[indent:] for line in lines[first : last + 1])
    return f"```python\n{code}\n```\n"


def pareto_caption(df: pd.DataFrame, study: str | None) -> str:
    """Name the models, n, k, seeds, decoding and what memory counts, all read from the rows."""
    rows = headline(df, study)
    listed = {c: ", ".join(dict.fromkeys(map(shown, rows[c]))) for c in ("benchmark", "model", "n", "k", "seed")}
    greedy = listed["k"] == "1"  # what `accuracy` means; sampled replies are scored as avg@k
    listed["decoding"] = "one greedy reply to each" if greedy else f"k = {listed['k']} sampled replies to each"
    return CAPTION.format(**listed)


def downloads(stem: str, rows: str) -> str:
    files = {"all rows (CSV)": rows, "the figure's points (CSV)": f"{stem}.csv", "the figure (SVG)": f"{stem}.svg"}
    return "Download: " + " · ".join(f"{{download}}`{name} </{path}>`" for name, path in files.items())


def header(run: Run, files: Sequence[str]) -> str:
    """What stands below the title of a run's page."""
    result = run.result
    kind = "one of **your local runs**" if run.local else "an executed notebook"
    lines = [
        f":::{{admonition}} {'Local run' if run.local else 'Run'} {run.label}",
        f":class: {'warning' if run.local else 'note'}",
        "",
        f"This page is {kind}: run `{result.run_id}`, {run.wall_s:,.0f} s on {result.device}. Make it again with",
        "",
        fenced(result.command),
        "",
    ]
    known = f"{result.study}/{result.name}" if result.name and result.study != "local" else result.run_id
    known = result.name if run.page.startswith("runs/shipped/") else known
    lines.append(f"`lowbit show {known}` prints its parameters, metrics and memory.")
    if result.parents:
        more = len(result.parents) - MOST_PARENTS
        shown = ", ".join(f"`{parent}`" for parent in result.parents[: None if more < 2 else MOST_PARENTS])
        lines.append(f"Its parents: {shown}{f' and {more} more' if more > 1 else ''}.")
    if files:
        lines.append("Download: " + ", ".join(f"{{download}}`{file} </{run.page}/{file}>`" for file in files) + ".")
    return "\n".join([*lines, ":::"])


def with_header(notebook: nbformat.NotebookNode, text: str, label: str = "") -> nbformat.NotebookNode:
    """Put `text` below the first heading of a notebook, which stays the page's title; `label` is added to that."""
    first = notebook.cells[0] if notebook.cells else None
    if first is None or first.cell_type != "markdown" or not first.source.lstrip().startswith("# "):
        notebook.cells[:0] = [nbformat.v4.new_markdown_cell(text)]
        return notebook
    title, _, rest = first.source.lstrip().partition("\n")
    title += f": {label}" if label else ""
    first.source = f"{title}\n\n{text}\n\n{rest.lstrip()}"
    return notebook


def with_alt(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Give every picture of a notebook a text: what the docstring of the function that drew it says it shows, else the
    comment that opens its cell, else the heading above it.
    """
    heading = ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            headings = [line.lstrip("# ") for line in cell.source.splitlines() if line.startswith("#")]
            heading = headings[-1] if headings else heading
        elif any(kind.startswith("image/") for output in cell.get("outputs", []) for kind in output.get("data", {})):
            text = _drawn(cell.source) or f"Figure of the section {heading}"
            cell.metadata.setdefault("mystnb", {}).setdefault("image", {}).setdefault("alt", text)
    return notebook


def _drawn(source: str) -> str:
    """What the figure of a cell shows; "" where neither a docstring nor a comment says it."""
    if "pareto.pareto(" in source:
        return PARETO_ALT
    if call := re.search(r"\bfigures\.(\w+)\(", source):
        from helpers.report import figures  # matplotlib takes a second to import

        return " ".join((getattr(figures, call[1], None).__doc__ or "").split())
    first = source.lstrip().partition("\n")[0]
    return first.lstrip("# ") if first.startswith("#") else ""


def runs_of(study: str, runs: Sequence[Run]) -> str:
    """The page that lists the runs of a study."""
    title, text = STUDIES.get(study, (f"Runs of {study}", f"`lowbit study {study}` makes them."))
    rows = [[run.link, run.result.stage, f"{run.wall_s:,.0f}", inline(run.result.command)] for run in runs]
    return f"# {title}\n\n{text}\n\n" + table(["run", "stage", "seconds", "command"], rows)


def not_run(title: str, command: str) -> str:
    """The page of a run that does not exist yet."""
    return f"# {title}\n\nThis run is **not published yet**: there is nothing to show.\n\n```bash\n{command}\n```\n"


def status_versions(runs: Sequence[Run]) -> str:
    """One row a package; two versions in a row mean that runs of two environments were published together."""
    if not runs:
        return NOTHING
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        for package, version in run.result.versions.items():
            found.setdefault(package, {})[version] = None
    order = [*filter(found.__contains__, VERSIONS_FIRST), *sorted(found.keys() - set(VERSIONS_FIRST))]
    return table(["package", "version"], [[package, ", ".join(found[package])] for package in order])


def local_table(runs: Sequence[Run], published: dict[str, Result]) -> str:
    """Each local run with its first metric, and how it compares with the published run of the same id."""
    rows = []
    for run in runs:
        first = next((f"{shown(metric.metric)} {metric.value:.3f}" for metric in run.result.metrics), "–")
        twin = published.get(run.result.run_id)
        compared = _compare(run.result, twin) if twin else "not published"
        where = (run.result.study, run.result.stage)
        rows.append([run.link, *where, first, compared, f"{run.wall_s:,.0f}", inline(run.result.command)])
    header = ["run", "study", "stage", "first metric", "against the published run of this id", "seconds", "command"]
    return table(header, rows, tall=True)


def _compare(local: Result, published: Result) -> str:
    ours, theirs = ([(m.metric, m.benchmark, m.value) for m in result.metrics] for result in (local, published))
    if not ours and not theirs:
        return "no metrics to compare"
    if ours == theirs:
        return "all metrics equal"
    differ = len(set(ours) ^ set(theirs)) // 2
    return f"{differ} of {len(theirs)} metrics differ; published: {shown(theirs[0][0])} {theirs[0][2]:.3f}"


def _line(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def interval(row: pd.Series) -> str:
    """0.741 [0.702, 0.778]; a metric without an interval shows its value alone."""
    value = f"{row['value']:.3f}"
    return value if pd.isna(row["ci_low"]) else f"{value} [{row['ci_low']:.3f}, {row['ci_high']:.3f}]"


def memory_shown(row: pd.Series) -> str:
    """A memory that was only counted says so: the weights were rounded, and kept as floating-point numbers."""
    exact = pd.isna(row["packed"]) or row["packed"] or row["bits"] == 16
    return memory(row["memory_bytes"]) + ("" if exact else ", simulated")


def shown(value: Any) -> str:
    """A value of a run in Markdown, where it is itself and nothing else: a model's name may hold anything."""
    return re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", text(value))


def inline(command: str) -> str:
    """A text as code in a line, whatever backticks are in it."""
    ticks = "`" * (max(map(len, re.findall("`+", command)), default=0) + 1)
    pad = " " if "`" in command else ""
    return f"{ticks}{pad}{' '.join(command.split())}{pad}{ticks}"


def fenced(command: str) -> str:
    """A command as a block of code, whatever backticks are in it."""
    ticks = "`" * max(3, max(map(len, re.findall("`+", command)), default=0) + 1)
    return f"{ticks}bash\n{command}\n{ticks}"


def text(value: Any) -> str:
    return "–" if value is None or value == "" or pd.isna(value) else str(value)


def number(value: Any, digits: int = 0) -> str:
    return "–" if value is None or pd.isna(value) else f"{float(value):,.{digits}f}"
