"""The Pareto figure: which points are on the frontier, and what is drawn and written."""

import re

import matplotlib as mpl
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from helpers.errors import UserError
from helpers.report.pareto import pareto, points

mpl.use("Agg")


def results(*arms, **common):
    rows = [
        {"study": "micro", "source": "run", "metric": "accuracy", "benchmark": "arithmetic", "model": model, "recipe": recipe,
         "method": recipe.split(" > ")[-1],
         "scheme": f"w{bits}g64" if bits < 16 else "bf16", "bits": bits, "effective_bits": float(bits), "memory_bytes": memory,
         "value": value, "ci_low": max(0, value - 0.04), "ci_high": min(1, value + 0.04), "n": 500, "k": 1, "seed": seed} | common
        for model, recipe, bits, memory, value, seed in arms
    ]  # fmt: skip
    return pd.DataFrame(rows)


ARMS = [
    ("xs", "base", 16, 300, 0.2, 0), ("xs", "base > grpo", 16, 300, 0.5, 0), ("xs", "base > grpo > rtn", 4, 100, 0.4, 0),
    ("xs", "base > grpo > rtn", 2, 60, 0.0, 0), ("s", "base", 16, 1600, 0.4, 0), ("s", "base > grpo", 16, 1600, 0.75, 0),
    ("s", "base > grpo > rtn", 4, 500, 0.7, 0), ("s", "base > grpo > rtn", 3, 400, 0.45, 0),
]  # fmt: skip


def test_frontier_by_hand():
    table = points(results(*ARMS))
    assert list(table[table["frontier"]]["memory_bytes"]) == [60, 100, 300, 500, 1600]
    assert not table[(table["model"] == "s") & (table["bits"] == 3)]["frontier"].item()


def test_equal_memory_keeps_the_better_one_only():
    table = points(results(("a", "base", 16, 100, 0.3, 0), ("b", "base", 16, 100, 0.6, 0)))
    assert list(table[table["frontier"]]["model"]) == ["b"]


def test_seeds_are_averaged_with_an_interval_over_seeds():
    table = points(results(("a", "base", 16, 100, 0.3, 0), ("a", "base", 16, 100, 0.5, 1)))
    assert table["value"].tolist() == [0.4]
    assert table["seeds"].tolist() == [2]
    # t(0.975, 1) * sd / sqrt(2) = 12.706 * 0.1414 / 1.4142
    assert table["ci_high"].item() == pytest.approx(0.4 + 12.7062 * 0.1, abs=1e-3)


def test_one_seed_keeps_its_own_interval_and_two_runs_of_one_seed_are_two_points():
    table = points(results(("a", "base", 16, 100, 0.3, 0), ("a", "base", 16, 100, 0.5, 0)))
    assert table["value"].tolist() == [0.5, 0.3]
    assert table["ci_low"].tolist() == pytest.approx([0.46, 0.26])


def test_files_and_labels(tmp_path):
    figure = pareto(results(*ARMS), tmp_path / "out" / "pareto")
    axis = figure.axes[0]
    assert "n = 500, k = 1, seeds = 1" in axis.get_title(loc="left")
    assert {t.get_text() for t in axis.texts} >= {"s grpo 16 bit", "s rtn 4 bit"}
    renderer = FigureCanvasAgg(figure).get_renderer()
    boxes = [t.get_window_extent(renderer) for t in axis.texts]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    first = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert set(first) == {"pareto.svg", "pareto-dark.svg", "pareto.csv"}
    assert not re.search(rb"href=\"http", first["pareto.svg"].split(b"<metadata>")[0])
    pareto(results(*ARMS), tmp_path / "out" / "pareto")
    assert first == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}


def test_no_rows_is_said():
    with pytest.raises(UserError, match="no evaluation has bleu on arithmetic: the metrics there are accuracy"):
        points(results(*ARMS), metric="bleu")
