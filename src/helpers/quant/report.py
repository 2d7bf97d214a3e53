"""The per-layer report as a table and as one number."""

from collections.abc import Sequence

import pandas as pd

from helpers.quant.quantize import LayerReport
from helpers.runs import Metric


def report_table(report: Sequence[LayerReport]) -> pd.DataFrame:
    """One row a layer: shape, relative error, bytes, effective bits, milliseconds."""
    return pd.DataFrame(
        {
            "layer": [r.name.removeprefix("model.") for r in report],
            "shape": [f"{r.shape[0]} x {r.shape[1]}" for r in report],
            "relative error": [round(r.error, 4) for r in report],
            "bytes": [r.nbytes for r in report],
            "effective bits": [round(r.bits, 3) for r in report],
            "ms": [round(1000 * r.seconds, 2) for r in report],
        }
    ).set_index("layer")


def weight_error(report: Sequence[LayerReport]) -> Metric:
    """The mean relative error of the layers' weights, as a metric over layers."""
    value = sum(r.error for r in report) / len(report)
    return Metric(
        metric="weight_error", value=value, n=len(report), k=1, ci_low=None, ci_high=None, task="", benchmark="weights"
    )
