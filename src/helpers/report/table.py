"""The results table: one row a metric, from the runs that the studies' plans name and from all lone runs.

The order is that of studies by name, runs by plan (lone runs by id) and metrics as recorded, so equal runs give equal
files. The table leaves out what would make it large and nobody looks up in it: rewards by level, which follow from
accuracy and boxes, and the end of a commit's hash. They are in each run's result.json.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import pandas as pd

from helpers import project, runs
from helpers.records import Result, RunError, disk_errors, write_text
from helpers.report.reported import beside

COLUMNS = [
    *("study", "run_id", "stage", "model", "params", "method", "scheme", "bits", "group_size", "effective_bits"),
    *("memory_bytes", "packed", "source", "task", "benchmark", "metric", "value", "ci_low", "ci_high", "n", "k"),
    *("seed", "reply_tokens", "wall_s", "commit", "command", "recipe", "name"),
]
COMMIT = 12  # digits of its hash
INTEGERS = ["params", "bits", "group_size", "memory_bytes", "n", "k", "seed"]


def rows(results: Iterable[Result]) -> pd.DataFrame:
    """One row for each metric of each result, with the columns of results.csv; runs without metrics give none."""
    frame = pd.DataFrame([row for result in results for row in _rows(result)], columns=COLUMNS)
    for name in INTEGERS:  # whole numbers that may be missing: 64, not 64.0
        frame[name] = frame[name].astype("Int64")
    return frame


def _rows(result: Result) -> Iterator[dict]:
    model, memory = result.model, result.memory
    if result.stage == "speed":  # a time is no score; these rows are speed.json
        return
    for metric in result.metrics:
        if metric.metric.startswith("reward") and "/" in metric.benchmark:
            continue
        yield {
            "study": result.study,
            "run_id": result.run_id,
            "stage": result.stage,
            "model": model.get("name") or model.get("size"),
            "params": model.get("parameters"),
            **{name: model.get(name) for name in ("method", "scheme", "bits", "group_size")},
            "effective_bits": memory.effective_bits if memory else None,
            "memory_bytes": memory.total_bytes if memory else None,
            "packed": memory.packed if memory else None,
            "source": "run",
            **metric.model_dump(exclude={"detail"}),
            "seed": result.seed,
            "wall_s": result.timings.get("wall_s"),
            "commit": result.commit[:COMMIT],
            "command": result.command,
            "recipe": model.get("recipe"),  # the steps from the base model on, which the Pareto figure groups by
            "name": result.name,
        }


def local() -> list[Result]:
    """Complete local runs: those of each study's plan under its name, then every lone run."""
    found = []
    for plan in sorted(project.runs_dir().glob("[!.]*/plan.json")):
        content = json.loads(plan.read_text())
        for job in content["jobs"]:
            if path := runs.done(job["run_id"]):
                # a run may have been made by another study first: here it counts under this one
                found.append(runs.read(path).model_copy(update={"study": content["study"], "name": job["name"]}))
    planned = {result.run_id for result in found}
    for path in sorted(project.runs_dir().glob("local/*/*/result.json")):
        if runs.done(path.parent.name) and path.parent.name not in planned:
            found.append(runs.read(path))
    return found


def write() -> Path:
    """Write runs/results.csv."""
    frame = rows(local())
    if frame.empty:
        raise RunError(f"No finished run in {project.runs_dir()} has metrics: `lowbit study micro` makes some.")
    path = project.runs_dir() / "results.csv"
    with disk_errors(path):
        write_text(path, beside(frame).to_csv(index=False, lineterminator="\n"))
    return path


def summary(frame: pd.DataFrame, task: str) -> pd.DataFrame:
    """One row an evaluated model on `task`: memory, accuracy with its 95 % interval, the other scores, reply length."""
    whole = frame[(frame["benchmark"] == task) & (frame["stage"] == "eval")]
    if whole.empty:
        raise RunError(f"None of these runs is an evaluation on {task}: give evaluations such as micro/eval-base-s.")
    keys = ["model", "recipe", "scheme", "seed"]
    shown = []
    for values, group in whole.groupby(keys, dropna=False, sort=False):
        scores = group.set_index("metric")
        row = dict(zip(keys, values, strict=True))
        row["eff. bits"] = f"{group['effective_bits'].iloc[0]:.2f}"
        row["KiB"] = f"{group['memory_bytes'].iloc[0] / 1024:,.1f}"
        for name, score in scores.iterrows():
            if name.startswith(("accuracy", "avg@")) or name == "reward":
                row[name] = f"{score['value']:.3f}"
            if name == "accuracy":
                row["95 % interval"] = f"{score['ci_low']:.3f} to {score['ci_high']:.3f}"
                row["tokens"] = f"{score['reply_tokens']:.1f}"
        shown.append(row)
    return pd.DataFrame(shown).set_index(keys)
