"""What an evaluation looks like to a reader: scores as a table, by level, outcomes, and the replies kept on disk."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from helpers.errors import UserError
from helpers.grading import OUTCOMES, Verdict, grade
from helpers.lookup import load_parent
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
    """One row a level, one column a metric (values), with the number of problems and the mean length of greedy replies.

    Of several benchmarks together: one row a benchmark.
    """
    parts = [(m, m.benchmark.removeprefix(f"{task}/level")) for m in metrics if m.benchmark != task]
    rows: dict[int | str, dict] = {}
    for m, part in parts:
        row = rows.setdefault(int(part) if part.isdigit() else part, {"n": m.n})
        row[m.metric] = f"{m.value:.3f}"
        if m.metric == "accuracy":
            row["tokens"] = f"{m.reply_tokens:.1f}"
    levels = all(part.isdigit() for _, part in parts)
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("level" if levels else "benchmark")


def levels(metrics: Sequence[Metric], task: str) -> dict[str, list[tuple[float, float, float]]]:
    """Accuracy and avg@k by level: label -> (value, low, high) for levels 1, 2, ..., not a number where a level has no problems."""
    found: dict[str, dict[int, tuple[float, float, float]]] = {}
    for m in metrics:
        if m.benchmark.startswith(f"{task}/level") and not m.metric.startswith("reward"):
            rows = found.setdefault("greedy" if m.metric == "accuracy" else m.metric, {})
            rows[int(m.benchmark.rpartition("level")[2])] = (m.value, m.ci_low, m.ci_high)
    nothing = (float("nan"),) * 3
    return {label: [rows.get(level, nothing) for level in range(1, max(rows) + 1)] for label, rows in found.items()}


def outcomes(problems: Sequence[Problem], verdicts: Sequence[Verdict]) -> pd.DataFrame:
    """How many problems of each level, or each benchmark, ended in each outcome; time-outs only where there are any."""
    several = len({p.benchmark for p in problems}) > 1
    part = "benchmark" if several else "level"
    rows = pd.DataFrame({part: [getattr(p, part) for p in problems], "outcome": [v.outcome for v in verdicts]})
    columns = [outcome for outcome in OUTCOMES if outcome != "timeout" or outcome in set(rows["outcome"])]
    return pd.crosstab(rows[part], rows["outcome"]).reindex(columns=columns, fill_value=0)


def habits(problems: Sequence[Problem], replies: Sequence[Reply]) -> pd.DataFrame:
    """Shares of the ways to reply (direct or a chain, boxed or not), and how often each is right."""
    verdicts = grade([r.text for r in replies], [p.gold for p in problems], problems[0].grading)
    rows = pd.DataFrame(
        {
            "habit": [
                f"{'chain' if '<think>' in r.text else 'direct'}, {'boxed' if v.boxed else 'no box'}"
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


def kept(ref: str, parent: str) -> Path:
    """The folder of an evaluation whose replies are graded again; it must be of the model with the id `parent`.

    Errors: `UserError` naming the run.
    """
    found = load_parent(ref, what="evaluation")
    if found.result is None or found.result.stage != "eval":
        raise UserError(f"replies = {ref} is no evaluation, so it holds no replies: give the run id of one.")
    if found.result.parents != [parent]:
        raise UserError(
            f"replies = {ref} are those of {', '.join(found.result.parents)}: give that as the parent, not {parent}."
        )
    return found.path


def restore(path: Path, problems: Sequence[Problem], k: int = 1) -> list[Reply]:
    """Replies that `store` wrote, `k` a problem, in the problems' order; their token ids are not kept, only how many there were.

    Errors: `UserError` where the file holds replies to other problems, or another number of them.
    """
    try:
        rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().splitlines()]
    except FileNotFoundError:
        raise UserError(f"{path} is not there: that evaluation kept no such replies.") from None
    asked = [(p.id, p.prompt) for p in problems for _ in range(k)]
    if asked != [(row["id"], row["prompt"]) for row in rows]:
        raise UserError(
            f"{path} holds {len(rows)} replies to other problems than the {len(asked)} asked for: give its task, n, k and seed."
        )
    return [Reply(row["id"], row["reply"], (0,) * row["tokens"], row["finished"]) for row in rows]
