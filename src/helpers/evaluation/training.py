"""What a training run itself reports: where its curves ended. No interval: these are means over rollouts of a moving policy."""

from collections.abc import Mapping, Sequence

from helpers.runs import Metric

LAST = 10  # steps averaged at the end of a curve


def final_loss(history: Sequence[Mapping[str, float]], batch_size: int) -> Metric:
    """The last logged pre-training loss, nats a reply token; n counts the documents that it is a mean over."""
    steps = history[-1]["step"] - (history[-2]["step"] if len(history) > 1 else 0)
    return _metric("loss", history[-1]["loss"], steps * batch_size, "corpus")


def training_metrics(history: Sequence[Mapping[str, float]], task: str) -> list[Metric]:
    """Means over the last `LAST` steps, and where the run has them, the last KL to the start and the last share of codes moved.

    Reward, length, clipped share, entropy, groups without advantage; |log p_sampler - log p_trainer|; codes that change in a step.
    The detail of the first three curves is the whole curve.
    """
    names = ("reward", "reply_tokens", "entropy", "clipped", "no_advantage", "mismatch_mean", "codes_changed")
    found = []
    for name in names:
        if last := [row[name] for row in history[-LAST:] if name in row]:
            metric = _metric(f"train_{name}", sum(last) / len(last), len(last), task)
            if name in names[:3]:
                curve = _points([(row["step"], row[name]) for row in history])
                metric = metric.model_copy(update={"detail": curve})
            found.append(metric)
    for name in ("kl", "codes_moved"):
        if values := [row[name] for row in history if name in row]:
            found.append(_metric(f"train_{name}", values[-1], 1, task))
    return found


def qat_metrics(history: Sequence[Mapping[str, float]], task: str, watched: int) -> list[Metric]:
    """The loss over the last `LAST` steps, nats a reply token; the share of codes that moved; the curve of accuracy on `watched`
    problems: its last point is the value, its steps and values are the detail.
    """
    losses = [row["loss"] for row in history if "loss" in row][-LAST:]
    found = [_metric("train_loss", sum(losses) / len(losses), len(losses), task)]
    if moved := [row["codes_moved"] for row in history if "codes_moved" in row]:
        found.append(_metric("train_codes_moved", moved[-1], 1, task))
    if points := [(row["step"], row["accuracy"]) for row in history if "accuracy" in row]:
        curve = _metric("train_accuracy", points[-1][1], watched, task)
        found.append(curve.model_copy(update={"detail": _points(points)}))
    return found


def _points(curve: Sequence[tuple[int, float]]) -> dict[str, list[float]]:
    steps, values = zip(*curve, strict=True)
    return {"steps": list(steps), "values": [round(value, 4) for value in values]}


def _metric(name: str, value: float, n: int, task: str) -> Metric:
    return Metric(metric=name, value=value, n=n, k=1, ci_low=None, ci_high=None, task=task, benchmark="training")
