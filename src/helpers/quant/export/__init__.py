"""Checkpoints that other software serves: each format's tensors and configuration, and the folder they are written to.

A format is a module: `objection` says why it cannot hold a model, if so, `written` how groups are cut for it, `tensors` and
`config` give what it holds. Uses quant's schemes, kernels, models and the run machinery.
"""

from helpers.quant.export.folder import FORMATS, ExportError, export

__all__ = ["FORMATS", "ExportError", "export"]
