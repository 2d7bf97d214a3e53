"""The tables of the reliability chapter, from what two trials wrote: faults.csv (tests/kills.py), load.csv (tests/load.py)."""

from pathlib import Path

import pandas as pd

from helpers.report import pages

NOT_TRIED = "Not tried yet: `python tests/{name}.py`.\n"


def kills(path: Path) -> str:
    """One line for each kind of process and signal: kills, in how many rounds, while which stages were at work."""
    if not path.is_file():
        return NOT_TRIED.format(name="kills")
    lines = []
    for (target, signal), own in pd.read_csv(path).groupby(["target", "signal"]):
        stages = own["stages"].fillna("").str.split().explode().value_counts()
        at_work = ", ".join(f"{stage} {count}" for stage, count in stages.sort_index().items())
        lines.append([target, signal, len(own), at_work, own["left"].sum()])
    header = ["killed", "signal", "kills", "stages at work", "outlived"]
    return pages.table(header, lines)


def outcome(path: Path) -> str:
    """One line for all rounds: what was compared at their ends, what differed, what was left behind."""
    if not path.is_file():
        return NOT_TRIED.format(name="kills")
    found = pd.read_csv(path)
    rounds = found.drop_duplicates("round")
    header = ["kills", "rounds", "rows and weights compared", "differences", "files left behind"]
    sums = [f"{rounds[name].sum():,}" for name in ("rows", "differences", "litter")]
    return pages.table(header, [[len(found), len(rounds), *sums]])


def load(path: Path) -> str:
    """One line a measurement; the limit is what must not be passed."""
    if not path.is_file():
        return NOT_TRIED.format(name="load")
    lines = [
        [row.what, f"{row.n:,}", f"{float(f'{row.value:.3g}'):,g} {row.unit}", _limit(row)]
        for row in pd.read_csv(path).itertuples()
    ]
    return pages.table(["what", "of how many", "measured", "limit"], lines)


def _limit(row) -> str:
    return "" if pd.isna(row.limit) else f"{row.limit:g} {row.unit}"
