"""What an evaluation looks like to a reader: scores as a table, by level, outcomes, and the replies kept on disk."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from helpers.grading import OUTCOMES, Verdict, grade_one
from helpers.runs import Metric
from helpers.sampling import Reply
from helpers.tasks import Problem


def table(metrics: Sequence[Metric], task: str) -> pd.DataFrame:
    """One row a metric over the whole task: value, 95 % interval, n, k, mean reply length in tokens."""
    whole = [m for m in metrics if m.benchmark == task]
    return pd.DataFrame(
        {
            "metric": [m.metric for m in whole],
            "value": [f"{m.value:.3f}" for m in whole],
            "95 % interval": [f"{m.ci_low:.3f} to {m.ci_high:.3f}" for m in whole],
            "n": [m.n for m in whole],
            "k": [m.k for m in whole],
            "tokens": [f"{m.reply_tokens:.1f}" for m in whole],
        }
    ).set_index("metric")


def by_level(metrics: Sequence[Metric], task: str) -> pd.DataFrame:
    """One row a level, one column a metric (values), with the number of problems and the mean length of greedy replies."""
    rows: dict[int, dict] = {}
    for m in metrics:
        if m.benchmark.startswith(f"{task}/level"):
            row = rows.setdefault(int(m.benchmark.rpartition("level")[2]), {"n": m.n})
            row[m.metric] = f"{m.value:.3f}"
            if m.metric == "accuracy":
                row["tokens"] = f"{m.reply_tokens:.1f}"
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("level")


def levels(metrics: Sequence[Metric], task: str) -> dict[str, list[tuple[float, float, float]]]:
    """Accuracy and avg@k by level: label -> (value, low, high) for each level in order."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for m in metrics:
        if m.benchmark.startswith(f"{task}/level") and not m.metric.startswith("reward"):
            found.setdefault("greedy" if m.metric == "accuracy" else m.metric, []).append(
                (m.value, m.ci_low, m.ci_high)
            )
    return found


def outcomes(problems: Sequence[Problem], verdicts: Sequence[Verdict]) -> pd.DataFrame:
    """How many problems of each level ended in each outcome."""
    rows = pd.DataFrame({"level": [p.level for p in problems], "outcome": [v.outcome for v in verdicts]})
    return pd.crosstab(rows["level"], rows["outcome"]).reindex(columns=list(OUTCOMES), fill_value=0)


def habits(problems: Sequence[Problem], replies: Sequence[Reply]) -> pd.DataFrame:
    """Shares of the ways to reply (direct or a chain, boxed or not), and how often each is right."""
    verdicts = [grade_one(r.text, p.gold) for p, r in zip(problems, replies, strict=True)]
    rows = pd.DataFrame(
        {
            "habit": [
                f"{'chain' if '<think>' in r.text else 'direct'}, {'no box' if v.answer is None else 'boxed'}"
                for r, v in zip(replies, verdicts, strict=True)
            ],
            "right": [v.outcome == "equal" for v in verdicts],
            "tokens": [len(r.ids) for r in replies],
        }
    )
    grouped = rows.groupby("habit").agg(share=("right", "size"), right=("right", "mean"), tokens=("tokens", "mean"))
    return grouped.assign(share=grouped["share"] / len(rows)).round(3)


def store(path: Path, problems: Sequence[Problem], replies: Sequence[Reply], verdicts: Sequence[Verdict]) -> None:
    """Write every reply with its verdict, one JSON object a line, gzipped; the same replies give the same bytes."""
    lines = []
    by_id = {problem.id: problem for problem in problems}
    for reply, verdict in zip(replies, verdicts, strict=True):
        problem = by_id[reply.problem_id]
        lines.append(
            json.dumps(
                {
                    "id": problem.id, "level": problem.level, "prompt": problem.prompt, "gold": problem.gold, "reply": reply.text,
                    "tokens": len(reply.ids), "finished": reply.finished, "outcome": verdict.outcome, "rule": verdict.rule,
                },
                ensure_ascii=False,
            )
        )  # fmt: skip
    path.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode(), mtime=0))
