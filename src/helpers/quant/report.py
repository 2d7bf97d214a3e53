"""The per-layer report as a table and as two numbers."""

from collections.abc import Sequence

import pandas as pd

from helpers.quant.quantize import LayerReport
from helpers.runs import Metric


def report_table(report: Sequence[LayerReport]) -> pd.DataFrame:
    """One row a layer: shape, relative errors of its weights and outputs, bytes, effective bits, milliseconds, notes if any."""
    rows = pd.DataFrame(
        {
            "layer": [r.name.removeprefix("model.") for r in report],
            "shape": [f"{r.shape[0]} x {r.shape[1]}" for r in report],
            "weight error": [round(r.weight_error, 4) for r in report],
            "output error": [None if r.output_error is None else round(r.output_error, 4) for r in report],
            "bytes": [r.nbytes for r in report],
            "effective bits": [round(r.bits, 3) for r in report],
            "ms": [round(1000 * r.seconds, 2) for r in report],
            "note": [r.note for r in report],
        }
    ).set_index("layer")
    return rows if any(r.note for r in report) else rows.drop(columns="note")


def layer_error(report: Sequence[LayerReport]) -> list[Metric]:
    """The mean over layers of the relative error of their weights, and of their outputs where those were measured."""
    found = {"weight_error": [r.weight_error for r in report], "output_error": [r.output_error for r in report]}
    return [
        Metric(metric=name, value=sum(errors) / len(errors), n=len(errors), k=1, benchmark="layers")
        for name, errors in found.items()
        if None not in errors
    ]
