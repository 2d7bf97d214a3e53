"""What a training run itself reports: where its curves ended. No interval: these are means over rollouts of a moving policy."""

from collections.abc import Mapping, Sequence

from helpers.runs import Metric

LAST = 10  # steps averaged at the end of a curve


def final_loss(history: Sequence[Mapping[str, float]], batch_size: int) -> Metric:
    """The last logged pre-training loss, nats a reply token; n counts the documents that it is a mean over."""
    steps = history[-1]["step"] - (history[-2]["step"] if len(history) > 1 else 0)
    return _metric("loss", history[-1]["loss"], steps * batch_size, "corpus")


def training_metrics(history: Sequence[Mapping[str, float]], task: str) -> list[Metric]:
    """Reward, length, clipped share and entropy over the last `LAST` steps, and the last KL to the start."""
    last = history[-LAST:]
    names = ("reward", "reply_tokens", "clipped", "entropy", "no_advantage")
    found = [_metric(f"train_{name}", sum(row[name] for row in last) / len(last), len(last), task) for name in names]
    kl = [row["kl"] for row in history if "kl" in row]
    return found + ([_metric("train_kl", kl[-1], 1, task)] if kl else [])


def _metric(name: str, value: float, n: int, task: str) -> Metric:
    return Metric(metric=name, value=value, n=n, k=1, ci_low=None, ci_high=None, task=task, benchmark="training")
