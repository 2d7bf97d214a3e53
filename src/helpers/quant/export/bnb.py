"""bitsandbytes: NF4 and LLM.int8 are no uniform grids with zero points, so no other format holds them, and this one nothing else.

A run of `method = bnb` is in this format already, so its files are copied: transformers (5.24) cannot save again what it
loaded in it.
"""

import shutil
from pathlib import Path

from helpers.quant.export.grids import Kind, Layers

READERS = "transformers with bitsandbytes"
ELSEWHERE = "it has uniform grids only"  # why another format cannot hold such layers
FILES = (".safetensors", ".json", ".jinja", ".txt", ".model")


def objection(kind: Kind, layers: Layers) -> str:
    """Why the format cannot hold layers of ours."""
    return "it has no uniform grids"


def copy_files(source: Path, target: Path) -> None:
    """Copy weights, configuration and tokenizer from one folder into another."""
    for file in sorted(source.iterdir()):
        if file.suffix in FILES:
            shutil.copyfile(file, target / file.name)
