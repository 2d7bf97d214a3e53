"""The tables of the chapter on where the damage sits: by kind of token, and how much of what RL gained is left."""

from collections.abc import Mapping, Sequence

import pandas as pd

from helpers.records import Result
from helpers.report.numbers import STUDY, TASK
from helpers.report.pages import NOTHING, Run, table

KINDS = ("digits", "operators", "structure")


def by_kind(df: pd.DataFrame, runs: Mapping[str, Run]) -> str:
    """One row a diagnosed model: KL a token by kind of token, and where greedy replies part from the full model's."""
    rows = df[df["stage"] == "diagnose"]
    lines = []
    for run_id, own in rows.groupby("run_id", sort=False):
        found = {(row.metric, row.benchmark): row for row in own.itertuples()}
        parted = found["parted", TASK]
        lines.append(
            [
                runs[run_id].link,
                *(f"{found['kl', f'{TASK}/{kind}'].value:.4f}" for kind in KINDS),
                f"{parted.value:.3f} [{parted.ci_low:.3f}, {parted.ci_high:.3f}]",
                f"{found['parted', f'{TASK}/digits'].value:.2f}",
            ]
        )
    header = ["model", *(f"KL at {kind}, nats" for kind in KINDS), "replies that part [95 %]", "of these at a digit"]
    return table(header, lines) if lines else NOTHING


def survival(results: Sequence[Result]) -> str:
    """One row a quantized model of the micro study: its share of what RL had gained, with a paired bootstrap interval."""
    found = [result for result in results if result.study == STUDY and result.stage == "eval" and _marked(result)]
    if not found:
        return NOTHING
    from helpers.evaluation.survival import survivals  # imports PyTorch

    rows = survivals(found, TASK).reset_index()
    if rows.empty:
        return NOTHING
    lines = [
        [row["model"], row["recipe"].rpartition(" > ")[2], row["scheme"], row["survival"], row["95 % interval"]]
        for _, row in rows.iterrows()
    ]
    return table(["model", "method", "scheme", "share of RL's gain left", "95 % interval"], lines)


def _marked(result: Result) -> bool:
    """Whether an evaluation kept a mark for each problem, without which nothing can be paired."""
    return any(metric.metric == "accuracy" and "problems" in metric.detail for metric in result.metrics)
