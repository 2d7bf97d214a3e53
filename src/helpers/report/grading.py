"""The tables of the chapter on grading: the rules as the code has them, and two graders on the same replies."""

from pathlib import Path

import pandas as pd

from helpers.grading import equal, find
from helpers.report.pages import table

NOT_RUN = "Not run yet: `make grading`.\n"


def rules() -> dict[str, str]:
    """The rules that find an answer, and those that compare two."""
    return {
        "grading-find": table(["rule", "the answer is"], [[f"`{k}`", v] for k, v in find.RULES.items()]),
        "grading-equal": table(
            ["rule", "two answers are equal if they have"], [[f"`{k}`", v] for k, v in equal.RULES.items()]
        ),
    }


def by_benchmark(path: Path) -> str:
    """One row a benchmark: what each grader gives to replies that are all right, and to replies that are all wrong."""
    if not path.is_file():
        return NOT_RUN
    df = pd.read_csv(path)
    rows = []
    for name, part in [*df.groupby("benchmark"), ("all", df)]:
        cells = [name]
        for right in (True, False):
            some = part[part["right"] == right]
            cells.append(f"{some['replies'].sum():,}")
            cells += [f"{some[grader].sum() / some['replies'].sum():.3f}" for grader in ("math_verify", "ours")]
        rows.append(cells)
    header = ["benchmark", "right replies", "math-verify alone", "ours", "wrong replies", "math-verify alone", "ours"]
    return table(header, rows)


def by_rewriting(path: Path) -> str:
    """One row a rewriting on which a grader errs: how many replies, and how many each accepts."""
    if not path.is_file():
        return NOT_RUN
    df = pd.read_csv(path)
    sums = df.groupby(["right", "rewriting"], sort=False)[["replies", "math_verify", "ours"]].sum().reset_index()
    wanted = sums["replies"].where(sums["right"], 0)
    sums["errors"] = (sums["math_verify"] - wanted).abs() + (sums["ours"] - wanted).abs()
    odd = sums[sums["errors"] > 0].sort_values(["right", "errors"], ascending=[False, False])
    rows = [
        [
            f"`{row['rewriting'].partition(': ')[2]}`" if ": " in row["rewriting"] else "",
            row["rewriting"].partition(": ")[0],
            "all" if row["right"] else "none",
            *(f"{row[column]:,}" for column in ("replies", "math_verify", "ours")),
        ]
        for _, row in odd.iterrows()
    ]
    return table(["example", "rewriting", "should accept", "replies", "math-verify alone", "ours"], rows)
