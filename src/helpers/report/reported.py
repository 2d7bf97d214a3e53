"""The papers' own figures, as rows of results.csv with `source` = paper: they stand beside ours and no run made them.

Figures come from abstracts and published summaries. Paper 1 reports a mean reward over five benchmarks (1.0 for a correct answer,
0.1 for a box, so at most 1.1) of one seed, which an evaluation on `papers` has as `macro reward`
(whether theirs averages benchmarks or problems was not found); its QLoRA is the adapter on the
NF4 base, neither merged nor quantized again. Paper 2 reports percent correct, of three seeds, which are our three samples, avg@3;
its averages are over benchmarks that are not all here. No interval was published for either.
"""

import pandas as pd

STUDY = "qwen3"  # whose rows they stand beside
PAPER_1, PAPER_2 = "arXiv:2511.15694", "arXiv:2601.14888"
SIZES = ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B")
REWARDS = {  # (recipe, scheme, bits) -> one figure a size
    ("base", "bf16", 16): (0.164, 0.212, 0.451, 0.473),
    ("base > grpo", "bf16", 16): (0.307, 0.418, 0.555, 0.594),
    ("base > qaft", "w8pt-sym", 8): (0.242, 0.325, 0.443, 0.496),
    ("base > grpo > bnb", "int8", 8): (0.222, 0.366, 0.528, 0.579),
    ("base > grpo > awq", "w8g128", 8): (0.220, 0.364, 0.526, 0.583),
    ("base > qlora", "nf4-dq", 4): (0.240, 0.382, 0.554, 0.556),
    ("base > grpo > bnb", "nf4-dq", 4): (0.223, 0.369, 0.527, 0.581),
    ("base > grpo > awq", "w4g128", 4): (0.225, 0.366, 0.533, 0.574),
}
SMALL, R1 = "Qwen3-0.6B", "DeepSeek-R1-Distill-Qwen-1.5B"
WORKFLOW = "base > gptq > qat_kd > qaft"
PERCENT = (  # model, recipe, scheme, bits, benchmark, figure
    (SMALL, "base", "bf16", 16, "math500", 74.80),
    (SMALL, "base > gptq", "w3g128", 3, "math500", 12.07),  # 44.53 points below the workflow
    (SMALL, WORKFLOW, "w3g128", 3, "math500", 56.60),
    (SMALL, "base", "bf16", 16, "aime120", 10.28),
    (SMALL, WORKFLOW, "w3g128", 3, "aime120", 5.56),
    (SMALL, "base", "bf16", 16, "gsm8k", 86.73),
    (SMALL, WORKFLOW, "w3g128", 3, "gsm8k", 79.76),
    (SMALL, "base", "bf16", 16, "average", 41.10),
    (SMALL, "base > gptq", "w3g128", 3, "average", 12.61),
    (SMALL, "base > awq", "w3g128", 3, "average", 8.40),
    (SMALL, WORKFLOW, "w3g128", 3, "average", 31.67),
    (R1, "base > gptq > qat_sft", "w3g128", 3, "average", 55.27),
    (R1, "base > gptq > qat_kd", "w3g128", 3, "average", 56.45),
    (R1, WORKFLOW, "w3g128", 3, "average", 58.51),
    (R1, "base", "bf16", 16, "math500", 84.40),
    (R1, "base > gptq", "w2g128", 2, "math500", 3.67),
    (R1, WORKFLOW, "w2g128", 2, "math500", 55.00),
)


def beside(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of results.csv with the papers' below them, where there are rows of their study."""
    if STUDY not in set(frame["study"]):
        return frame
    return pd.concat([frame, rows(frame.columns).astype(frame.dtypes)], ignore_index=True)


def rows(columns: pd.Index) -> pd.DataFrame:
    """One row a figure, under the names that ours have in `columns`; what was not published is empty."""
    found = [
        row(PAPER_1, model, *how, "papers", "macro reward", figure, 1)
        for how, figures in REWARDS.items()
        for model, figure in zip(SIZES, figures, strict=True)
    ]
    found += [row(PAPER_2, *about, "avg@3", figure / 100, 3) for *about, figure in PERCENT]
    return pd.DataFrame(found).reindex(columns=columns)


def row(
    source: str, model: str, recipe: str, scheme: str, bits: int, benchmark: str, metric: str, value: float, k: int
):
    """One figure. `command` says where it stands, since no command makes it."""
    return {
        "study": STUDY, "stage": "eval", "model": model, "method": recipe.rpartition(" > ")[2], "recipe": recipe, "scheme": scheme,
        "bits": bits, "group_size": 128 if "g128" in scheme else None, "source": "paper", "task": benchmark,
        "benchmark": benchmark, "metric": metric, "value": round(value, 4), "k": k, "command": source,
    }  # fmt: skip
