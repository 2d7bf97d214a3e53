"""Post-training quantizers: a scheme says what grid, a method finds the codes. Uses `runs.Metric`; sampling does not know it.

`quantize(model, method, scheme)` changes the model in place and gives a report a layer.
"""

from helpers.quant.quantize import METHODS, LayerReport, linear_layers, quantize
from helpers.quant.report import report_table, weight_error
from helpers.quant.rtn import Quantized, dequantize, round_to_nearest
from helpers.quant.scheme import Scheme, SchemeError

__all__ = [
    "METHODS",
    "LayerReport",
    "Quantized",
    "Scheme",
    "SchemeError",
    "dequantize",
    "linear_layers",
    "quantize",
    "report_table",
    "round_to_nearest",
    "weight_error",
]
