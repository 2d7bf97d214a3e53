"""The few numbers that the book's prose quotes, computed from the rows of results.csv.

Prose never holds a number of its own. It says `{{ grpo_s }}`, and `lowbit book` fills in what this module computed. The
names are always the same: one whose run is missing reads "not run yet". A name that nobody computes stops the build.

All of them use one row a model: accuracy over the whole task, at the lowest seed.
"""

from collections.abc import Callable

import pandas as pd

STUDY, TASK = "micro", "arithmetic"
SIZES = ("xs", "s")
WIDTHS = (8, 4, 3, 2)
METHODS = ("rtn", "gptq")
ARMS = {"base": ("base", 16), "grpo": ("base > grpo", 16)} | {
    f"{method}{bits}": (f"base > grpo > {method}", bits) for method in METHODS for bits in WIDTHS
}
KEEP = 0.95  # "how far can I go" asks for this share of full-precision accuracy; the first page states it
NOT_RUN = "*not run yet*"

Page = Callable[[str], str | None]  # run id -> document name of its page


def headline(df: pd.DataFrame, study: str | None = STUDY) -> pd.DataFrame:
    """One row a model: accuracy over the whole task, lowest seed; of one study, or of all with None."""
    rows = df[(df["metric"] == "accuracy") & (df["benchmark"] == TASK)]
    rows = rows if study is None else rows[rows["study"] == study]
    return rows[rows["seed"] == rows["seed"].min()]


def numbers(df: pd.DataFrame, page: Page = lambda run_id: None) -> dict[str, str]:
    """Every quoted number as MyST text, linked to the page of its run where it has one."""
    rows = headline(df)
    found = {f"{arm}_{size}": _row(rows, size, *ARMS[arm]) for arm in ARMS for size in SIZES}
    texts = {}
    for name, row in found.items():
        texts[name] = NOT_RUN if row is None else _link(percent(row["value"]), page(row["run_id"]))
        texts[f"memory_{name}"] = NOT_RUN if row is None else memory(row["memory_bytes"])
    for size in SIZES:
        full = found[f"grpo_{size}"]
        for method in METHODS:
            low = {bits: found[f"{method}{bits}_{size}"] for bits in WIDTHS}
            texts[f"fewest_bits_{method}_{size}"] = _fewest_bits(full, low, page)
            texts |= {f"loss{bits}_{method}_{size}": _loss(full, low[bits], page) for bits in WIDTHS}
    texts["n_problems"] = NOT_RUN if rows.empty else " or ".join(f"{n:,}" for n in sorted(set(rows["n"].astype(int))))
    texts["seed"] = NOT_RUN if rows.empty else str(int(rows["seed"].min()))
    return texts


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"  # 0.7412 -> 74.1 %


def memory(n_bytes: float) -> str:
    """1,580,544 -> 1.51 MiB"""
    if pd.isna(n_bytes):
        return "unknown"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n_bytes < 1000 or unit == "GiB":
            break
        n_bytes /= 1024
    return f"{n_bytes:.3g} {unit}"


def _row(rows: pd.DataFrame, size: str, recipe: str, bits: int) -> pd.Series | None:
    match = rows[(rows["model"] == size) & (rows["recipe"] == recipe) & (rows["bits"] == bits)]
    return None if match.empty else match.iloc[0]


def _link(text: str, page: str | None) -> str:
    return f"{{doc}}`{text} </{page}>`" if page else text


def _loss(full: pd.Series | None, low: pd.Series | None, page: Page) -> str:
    if full is None or low is None:
        return NOT_RUN
    points = round(100 * (full["value"] - low["value"]), 1)
    text = f"{points:.1f} points" if points >= 0 else f"−{-points:.1f} points (a gain)"
    return _link(text, page(low["run_id"]))


def _fewest_bits(full: pd.Series | None, low: dict[int, pd.Series | None], page: Page) -> str:
    if full is None or any(row is None for row in low.values()):
        return NOT_RUN
    enough = [bits for bits in WIDTHS if low[bits]["value"] >= KEEP * full["value"]]
    if not enough:
        return f"none of {', '.join(map(str, WIDTHS))} bits"
    return _link(f"{min(enough)} bits", page(low[min(enough)]["run_id"]))
