"""What a grader does to a score: math-verify alone and ours on the same replies, whose verdicts are known because a rule made them.

`python -m helpers.evaluation.graders` takes every gold of the papers' five benchmarks (`LOWBIT_DATA` or the hub), writes it in each
way of `grading.rewrites`, has both graders judge the boxed answer, and writes `book/results/grading.csv`: one row a benchmark and
rewriting, with the number of replies, whether they are right, and how many each grader accepts.
"""

import sys
from collections import Counter
from pathlib import Path

import pandas as pd

from helpers import project, tasks
from helpers.grading import pool
from helpers.grading.rewrites import replies
from helpers.tasks import Problem

GRADERS = {"math_verify": "math-verify", "ours": "maths"}


def compare(problems: list[Problem]) -> pd.DataFrame:
    """One row a benchmark and rewriting: right, replies, and how many of them each grader accepts."""
    made = [(p, name, right, answer) for p in problems for name, right, answer in replies(p.gold)]
    counts: dict[tuple[str, bool, str], Counter] = {}
    with pool.Pool() as workers:
        for grader, how in GRADERS.items():
            jobs = [(rf"Therefore the answer is \boxed{{{answer}}}.", p.gold, how) for p, _, _, answer in made]
            for (p, name, right, _), verdict in zip(made, workers.map(jobs), strict=True):
                counts.setdefault((p.benchmark, right, name), Counter()).update(
                    {"replies": grader == "ours", grader: verdict[0] == "equal"}
                )
    rows = [
        {
            "benchmark": benchmark,
            "right": right,
            "rewriting": name,
            **{key: count[key] for key in ("replies", *GRADERS)},
        }
        for (benchmark, right, name), count in counts.items()
    ]
    return pd.DataFrame(rows).sort_values(["benchmark", "right", "rewriting"], ascending=[True, False, True])


def main(path: Path) -> None:
    compare(tasks.load(tasks.PAPERS, "test", 10**6)).to_csv(path, index=False, lineterminator="\n")
    print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else project.root() / "book" / "results" / "grading.csv")
