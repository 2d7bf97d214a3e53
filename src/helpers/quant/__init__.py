"""Post-training quantizers: a scheme says what grid, a method finds the codes. Uses kernels, models and `runs.Metric`.

`quantize(model, method, scheme, calibration)` changes the model in place and gives a report a layer; sampling does not know it.
"""

from helpers.quant import fake
from helpers.quant.calibration import decoder_blocks
from helpers.quant.fit import METHODS, check, refuse_unread
from helpers.quant.grid import Quantized
from helpers.quant.layers import linear_layers, weight_of
from helpers.quant.mixed import Mixed, mixed
from helpers.quant.quantize import LayerReport, quantize
from helpers.quant.report import layer_error, report_table
from helpers.quant.rtn import round_to_nearest
from helpers.quant.scheme import Scheme, SchemeError, bitsandbytes

__all__ = [
    "METHODS",
    "LayerReport",
    "Mixed",
    "Quantized",
    "Scheme",
    "SchemeError",
    "bitsandbytes",
    "check",
    "decoder_blocks",
    "fake",
    "layer_error",
    "linear_layers",
    "mixed",
    "quantize",
    "refuse_unread",
    "report_table",
    "round_to_nearest",
    "weight_of",
]
