"""Where in the network a quantized model differs: each layer of it alone, put into the full-precision model.

The measure is the KL a token of `quant.sensitivity`. Where AWQ moved scales into the norms, a layer makes no sense without its
block, and only whole decoder blocks are measured; so it is with an adapter's layers. Intervals resample texts.
"""

from collections.abc import Sequence

import pandas as pd
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from helpers.evaluation.bootstrap import ratio
from helpers.evaluation.diagnose import with_prompts
from helpers.models import adapters
from helpers.quant import decoder_blocks
from helpers.quant.sensitivity import alone, changed_layers
from helpers.runs import Metric
from helpers.sampling import Reply
from helpers.tasks import Problem


def by_layer(
    full: PreTrainedModel,
    low: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    replies: Sequence[Reply],
    task: str,
) -> list[Metric]:
    """`kl_alone` of each changed layer, as benchmark `task/0.self_attn.q_proj`, of each block (`task/0`), and of all (`task`).

    Errors: those of `quant.sensitivity`.
    """
    full, low = (
        adapters.base_of(full),
        adapters.base_of(low),
    )  # with the adapter's layers inside it, but by their own names
    blocks = [name for name, _ in decoder_blocks(full)]
    units = ["", *blocks, *changed_layers(full, low)]
    off = alone(full, low, units, *with_prompts(tokenizer, problems, replies))
    root = blocks[0].rpartition(".")[0] + "."
    metrics = []
    for name in units:
        value, low_end, high_end = ratio(off[name][:, 0], off[name][:, 1])
        benchmark = f"{task}/{name.removeprefix(root)}" if name else task
        metrics.append(
            Metric(
                metric="kl_alone", value=value, n=len(replies), ci_low=low_end, ci_high=high_end, task=task,
                benchmark=benchmark, detail={"tokens": int(off[name][:, 1].sum())},
            )
        )  # fmt: skip
    return metrics


def sums(metrics: Sequence[Metric]) -> pd.DataFrame:
    """Do the parts add up? The sum of KL over layers and over blocks, each alone, and the KL of all together."""
    whole = [m.value for m in metrics if m.benchmark == m.task]
    parts = {m.benchmark.removeprefix(f"{m.task}/"): m.value for m in metrics if m.benchmark != m.task}
    layers = [value for label, value in parts.items() if "." in label]
    blocks = [value for label, value in parts.items() if "." not in label]
    found = {"layers, each alone": layers, "blocks, each alone": blocks, "all together": whole}
    rows = [[what, len(values), f"{sum(values):.4f}"] for what, values in found.items() if values]
    return pd.DataFrame(rows, columns=["what", "parts", "sum of KL, nats a token"]).set_index("what")
