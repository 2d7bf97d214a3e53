"""What the papers claim and what the runs here say: one row a claim and model size (or width), in verdicts.csv.

A claim compares two arms. Runs of the two are paired by training seed, all of them evaluated on the same problems; the
difference of a seed's accuracies (its mean, where a seed has several pairs) is one observation, so that the luck of training is
part of the uncertainty. Over the seeds: the mean, Student's t interval, the p value of the t test against no difference, and
Holm's p value, corrected for all claims of a paper. Then, by the interval,

    lower, higher    holds if the whole of it lies on that side, contradicted if it lies on the other;
                     no difference if it contains zero and lies within `MARGIN` of it
    equal            holds if it lies within `MARGIN` of zero (an equivalence test), contradicted if it lies wholly beyond
    inconclusive     all else

Verdicts go by each row's own interval, uncorrected; few seeds make wide intervals. What no run here can test says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from helpers.report.numbers import TASK
from helpers.report.pages import table

STUDY = "arms"
MARGIN = 0.03  # of accuracy: what "about as good" may mean
COLUMNS = ["paper", "claim", "reported", "ours", "test", "p_value", "p_holm", "n", "seeds", "verdict", "run_ids"]
SIZES = ("xs", "s", "m", "l")
FULL = ("base > grpo", 16)


@dataclass(frozen=True)
class Arm:
    """Runs of one recipe and width; of one `size`, or of all."""

    recipe: str
    bits: int
    size: str = ""


@dataclass(frozen=True)
class Claim:
    """`first` is said to be lower or higher than `second`, or about equal; without arms the claim cannot be tested here."""

    claim: str
    reported: str
    first: Arm | None = None
    second: Arm | None = None
    expected: str = ""
    why: str = ""


AFTER = "base > grpo > "
CLAIMS = (  # of paper 1, arXiv 2511.15694
    Claim(
        "8-bit QAFT is worse than RL in full precision with 8-bit PTQ (AWQ) after it",
        "1.7B to 8B: 0.33 to 0.50 against 0.36 to 0.58", Arm("base > qaft", 8), Arm(f"{AFTER}awq", 8), "lower",
    ),
    Claim(
        "8-bit QAFT is worse than RL in full precision with 8-bit PTQ (BnB) after it",
        "1.7B to 8B: 0.33 to 0.50 against 0.37 to 0.58", Arm("base > qaft", 8), Arm(f"{AFTER}bnb", 8), "lower",
    ),
    Claim(
        "4-bit AWQ is about as good as 8-bit AWQ", "differences up to 0.009",
        Arm(f"{AFTER}awq", 4), Arm(f"{AFTER}awq", 8), "equal",
    ),
    Claim(
        "4-bit BnB is about as good as 8-bit BnB", "differences up to 0.003",
        Arm(f"{AFTER}bnb", 4), Arm(f"{AFTER}bnb", 8), "equal",
    ),
    Claim("8-bit PTQ (AWQ) is about as good as full precision", "4B, 8B: 95 to 98 %", Arm(f"{AFTER}awq", 8), Arm(*FULL), "equal"),
    Claim("QLoRA is about as good as RL in full precision", "4B: 0.554 against 0.555", Arm("base > qlora", 4), Arm(*FULL), "equal"),
    Claim(
        "QLoRA is about as good as 4-bit PTQ (BnB) after RL", "0.240, 0.382, 0.554, 0.556 against 0.223, 0.369, 0.527, 0.581",
        Arm("base > qlora", 4), Arm(f"{AFTER}bnb", 4), "equal",
    ),
    Claim("Dr.GRPO is about as good as GRPO", "not in the summaries", Arm("base > dr_grpo", 16), Arm(*FULL), "equal"),
    Claim("Which bits an 8-billion-parameter model can lose", "8B rows", why="needs a model of that size"),
)  # fmt: skip


def verdicts(df: pd.DataFrame, claims: Sequence[Claim] = CLAIMS, paper: str = "1") -> pd.DataFrame:
    """One row a claim and model size, from the rows of results.csv."""
    rows = df[(df["study"] == STUDY) & (df["metric"] == "accuracy") & (df["benchmark"] == TASK)]
    found = []
    for claim in claims:
        pairs = _pairs(rows, claim) if claim.first else pd.DataFrame()
        sizes = [size for size in SIZES if len(pairs) and (pairs["model_a"] == size).sum() > 1]
        if not sizes:
            found.append(judged((paper, claim.claim, claim.reported), pd.DataFrame(), claim.expected, why=claim.why))
        for size in sizes:
            about = (paper, f"{claim.claim} ({size})", claim.reported)
            found.append(judged(about, pairs[pairs["model_a"] == size], claim.expected))
    return pd.DataFrame(found, columns=COLUMNS)


def judged(
    about: tuple[str, str, str],
    pairs: pd.DataFrame,
    expected: str,
    what: str = "accuracy",
    margin: float | None = MARGIN,
    why: str = "",
) -> dict:
    """A row of verdicts.csv. `about`: paper, claim, what it reports; `pairs` have value_a, value_b, run_id_a, run_id_b, seed, n_a.

    `what` was compared, and `margin` in its unit is a small difference; `why` there are no pairs.
    """
    row = dict(zip(COLUMNS, about, strict=False))
    d = pairs.assign(d=pairs["value_a"] - pairs["value_b"]).groupby("seed")["d"].mean() if len(pairs) else ()
    if len(d) < 2:
        nothing = {"test": "", "p_value": None, "n": 0, "seeds": 0, "verdict": "untestable here", "run_ids": ""}
        return row | {"ours": why or "fewer than two seeds"} | nothing
    half = stats.t.ppf(0.975, len(d) - 1) * d.std(ddof=1) / np.sqrt(len(d))
    low, high = d.mean() - half, d.mean() + half
    a, b = pairs["value_a"].mean(), pairs["value_b"].mean()
    return row | {
        "ours": f"{a:.3f} against {b:.3f}: {d.mean():+.4f} [{low:+.4f}, {high:+.4f}]",
        "test": f"paired t over {len(d)} seeds ({what})",
        "p_value": float(stats.ttest_1samp(d, 0).pvalue) if d.std(ddof=1) > 0 else None,
        "n": int(pairs["n_a"].iloc[0]),
        "seeds": len(d),
        "verdict": judge(low, high, expected, margin),
        "run_ids": " ".join(dict.fromkeys([*pairs["run_id_a"], *pairs["run_id_b"]])),
    }


def corrected(found: pd.DataFrame) -> pd.DataFrame:
    """The rows of one paper with Holm's p values."""
    from helpers.evaluation.compare import holm  # imports PyTorch

    tested = found["p_value"].notna()
    return found.assign(p_holm=pd.Series(holm(list(found.loc[tested, "p_value"])), index=found.index[tested]))


def judge(low: float, high: float, expected: str, margin: float | None = MARGIN) -> str:
    """`holds`, `contradicted`, `no difference` or `inconclusive`, from the interval of first minus second."""
    small = margin is not None and -margin < low and high < margin
    if expected == "equal":
        if small:
            return "holds"
        return "contradicted" if margin is not None and (low > margin or high < -margin) else "inconclusive"
    if expected == "lower":
        low, high = -high, -low
    if low > 0:
        return "holds"
    if high < 0:
        return "contradicted"
    return "no difference" if small else "inconclusive"


def _pairs(rows: pd.DataFrame, claim: Claim) -> pd.DataFrame:
    """One row a pair: the runs of the two arms with one seed, and one size unless the claim names two."""
    found = []
    for arm in (claim.first, claim.second):
        own = rows[(rows["recipe"] == arm.recipe) & (rows["bits"] == arm.bits)]
        found.append(own[own["model"] == arm.size] if arm.size else own)
    on = ["seed"] if claim.first.size else ["seed", "model"]
    pairs = found[0].merge(found[1], on=on, suffixes=("_a", "_b"))
    return pairs if "model_a" in pairs else pairs.assign(model_a=pairs["model"])


def verdict_page(found: pd.DataFrame, published: bool = False) -> str:
    """The claims as a table for a reader; run ids are in the CSV, which `published` results have."""
    header = [
        "claim of the paper",
        "verdict",
        "here: difference [95 %]",
        "reported there",
        "test",
        "p",
        "p (Holm)",
        "n, seeds",
    ]
    lines = [
        [
            row["claim"],
            f"**{row['verdict']}**",
            row["ours"],
            row["reported"],
            row["test"],
            *("" if pd.isna(row[p]) else f"{row[p]:.2g}" for p in ("p_value", "p_holm")),
            f"{row['n']:,}, {row['seeds']}" if row["n"] else row["seeds"] or "",
        ]
        for _, row in found.iterrows()
    ]
    source = "\nThe run ids behind each row: {download}`verdicts.csv </results/verdicts.csv>`.\n" if published else ""
    return table(header, lines) + source


def arms_page(df: pd.DataFrame) -> str:
    """One row an arm, one column a size: mean accuracy over seeds with Student's t interval, and the number of seeds."""
    rows = df[(df["study"] == STUDY) & (df["metric"] == "accuracy") & (df["benchmark"] == TASK)]
    if rows.empty:
        return "Not run yet: `lowbit study arms`.\n"
    sizes = [size for size in SIZES if size in set(rows["model"])]
    keys = ["recipe", "scheme", "bits"]
    lines = []
    for (recipe, scheme, _), arm in sorted(rows.groupby(keys), key=lambda item: (item[0][0], -item[0][2])):
        by_size = dict(iter(arm.groupby("model")))
        lines.append(
            [recipe, scheme, *(mean_over_seeds(by_size[size]["value"]) if size in by_size else "–" for size in sizes)]
        )
    return table(["recipe", "scheme", *sizes], lines)


def mean_over_seeds(values: pd.Series, digits: int = 3) -> str:
    """0.850 ± 0.012 (3): mean, half of Student's 95 % interval, number of seeds."""
    if len(values) < 2:
        return f"{values.iloc[0]:.{digits}f} (1 seed)"
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return f"{values.mean():.{digits}f} ± {half:.{digits}f} ({len(values)})"
