"""The tables of the chapter on quantizers: every method at every width, and ours beside other people's."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pandas as pd

from helpers.report.numbers import STUDY, TASK
from helpers.report.pages import NOTHING, Run, table

BEFORE = "base > grpo"  # what is quantized in the micro study
METHODS = ("rtn", "rtn-clip", "awq", "gptq", "autoawq", "bnb")

Page = Callable[[str], str | None]  # run id -> document name of its page


def methods(df: pd.DataFrame, size: str, runs: Mapping[str, Run]) -> str:
    """One row a method, one column a width: accuracy, linked to its run, and the mean output error of the layers.

    The last column is the time of the quantizer itself at 4 bits.
    """

    def page(run_id: str) -> str | None:
        return runs[run_id].page

    rows = df[(df["study"] == STUDY) & (df["model"] == size)]
    scores = rows[(rows["metric"] == "accuracy") & (rows["benchmark"] == TASK)]
    errors = rows[rows["metric"] == "output_error"]
    widths = sorted(set(scores["bits"]) - {16}, reverse=True)
    lines = []
    for method in METHODS:
        recipe = f"{BEFORE} > {method}"
        cells = [_cell(_one(scores, recipe, b), _one(errors, recipe, b), page) for b in widths]
        if any(cell != "–" for cell in cells):
            lines.append([method, *cells, _seconds(_one(errors, recipe, 4), runs)])
    full = _one(scores, BEFORE, 16)
    if full is not None:
        lines.insert(0, [f"none, 16 bit: {_accuracy(full, page)}", *[""] * (len(widths) + 1)])
    return table(["method", *(f"{b} bit" for b in widths), "seconds"], lines) if lines else NOTHING


def _one(rows: pd.DataFrame, recipe: str, bits: int) -> pd.Series | None:
    match = rows[(rows["recipe"] == recipe) & (rows["bits"] == bits)]
    return None if match.empty else match.iloc[0]


def _cell(score: pd.Series | None, error: pd.Series | None, page: Page) -> str:
    if score is None:
        return "–"
    return _accuracy(score, page) + ("" if error is None else f" ({error['value']:.3f})")


def _seconds(row: pd.Series | None, runs: Mapping[str, Run]) -> str:
    spent = None if row is None else runs[row["run_id"]].result.timings.get("quantize_s")
    return "–" if spent is None else f"{spent:.2f}"


def _accuracy(row: pd.Series, page: Page) -> str:
    name = page(row["run_id"])
    text = f"{row['value']:.3f}"
    return f"{{doc}}`{text} </{name}>`" if name else text


def crosscheck(path: Path) -> str:
    """The table of `make crosscheck`; a ratio below 1 means that ours errs less."""
    if not path.is_file():
        return "Not run yet: `make crosscheck`.\n"
    df = pd.read_csv(path)
    header = [
        "method",
        "scheme",
        "peer",
        "layer error, ours / peer",
        "ratio",
        "perplexity, ours / peer",
        "seconds, ours / peer",
        "note",
    ]
    lines = [
        [
            row["method"],
            row["scheme"],
            f"{row['peer']} {row['peer_version']}",
            f"{row['layer_error_ours']:.4f} / {row['layer_error_peer']:.4f}",
            f"{row['layer_error_ours'] / row['layer_error_peer']:.3f}",
            f"{row['perplexity_ours']:.4f} / {row['perplexity_peer']:.4f}",
            f"{row['seconds_ours']:.2f} / {row['seconds_peer']:.2f}",
            "" if pd.isna(row["note"]) else row["note"],
        ]
        for _, row in df.iterrows()
    ]
    return table(header, lines)
