"""Load, save, describe and measure models; the micro architecture and its tokenizer.

`load` takes a run id, a shipped name, a folder or a hub id. Uses the run machinery to find a run's folder, and nothing else of the
project.
"""

from helpers.models import activations
from helpers.models.adapters import merge
from helpers.models.checkpoint import CheckpointError, count_parameters, latents, load, save
from helpers.models.describe import describe, full_precision, memory_of
from helpers.models.device import cores, device, device_name, seed_everything
from helpers.models.memory import measure
from helpers.models.micro import SIZES, build, build_tokenizer

__all__ = [
    "SIZES",
    "CheckpointError",
    "activations",
    "build",
    "build_tokenizer",
    "cores",
    "count_parameters",
    "describe",
    "device",
    "device_name",
    "full_precision",
    "latents",
    "load",
    "measure",
    "memory_of",
    "merge",
    "save",
    "seed_everything",
]
