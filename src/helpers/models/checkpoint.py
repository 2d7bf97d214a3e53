"""Read and write checkpoints: Hugging Face layout, safetensors only, no code from the checkpoint, no weight that is not a number.

Full-precision checkpoints are kept in bfloat16, so that "2 bytes a weight" is what lies on the disk; arithmetic runs in float32
unless told otherwise. De-quantized (simulated) checkpoints are kept in float32, since a grid point is rarely a bfloat16 number.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from helpers import runs
from helpers.errors import UserError
from helpers.models.device import device as best_device


class CheckpointError(UserError):
    """A checkpoint that is missing, unreadable, not safetensors, or holds weights that are not finite."""


def load(
    ref: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Give (model in eval mode, tokenizer) of a run id, a shipped name, a folder, or a hub id.

    Errors: `CheckpointError` naming the checkpoint and what is wrong with it.
    """
    found = runs.find(str(ref))
    source = str(found / "model" if found else ref)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        where = (
            ""
            if Path(source).is_dir()
            else " (there is no such folder here, and no such model could be had from a hub)"
        )
        raise CheckpointError(f"checkpoint {ref} cannot be loaded{where}: {reason}") from error
    if missing := sorted(map(str, report["missing_keys"])):  # they would be random numbers
        raise CheckpointError(f"checkpoint {ref} lacks {len(missing)} tensors, the first of them {missing[0]}.")
    refuse_non_finite(model, str(ref))
    tokenizer.padding_side = "left"
    return model.to(device or best_device()).eval(), tokenizer


def refuse_non_finite(model: PreTrainedModel, ref: str) -> None:
    """Raise `CheckpointError` on the first tensor that holds a NaN or an infinity."""
    for name, tensor in model.named_parameters():
        bad = int((~torch.isfinite(tensor)).sum())
        if bad:
            raise CheckpointError(
                f"checkpoint {ref} has {bad} weights that are not finite in {name}: train it again with a lower learning rate."
            )


def save(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, card: str, dtype=torch.bfloat16
) -> Path:
    """Write model, tokenizer and a model card (`card` is its text) into `folder`; a bfloat16 copy unless `dtype` says otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    refuse_non_finite(model, str(folder))
    was = next(model.parameters()).dtype
    model.to(dtype)
    model.save_pretrained(folder)
    model.to(was)  # what was rounded stays rounded: the model in memory is now the model on the disk
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n\n{card}\n"
    )
    return folder


def count_parameters(model: PreTrainedModel) -> int:
    """Number of weights, a tied matrix counted once."""
    return sum(p.numel() for p in model.parameters())
