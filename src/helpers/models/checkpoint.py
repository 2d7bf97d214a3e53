"""Read and write checkpoints: Hugging Face layout, safetensors only, no code from the checkpoint, no weight that is not a number.

Full-precision weights are kept in bfloat16, so that "2 bytes a weight" is what lies on the disk; arithmetic runs in float32 unless
told otherwise. Low-bit layers are kept as they are: packed codes, scales and zero points, or what bitsandbytes has. A model with an
adapter is kept as both, and loaded so.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from helpers import runs
from helpers.errors import UserError
from helpers.models import (
    adapters,
    lowbit,  # noqa: F401  makes transformers know packed checkpoints
)
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
            source,
            dtype=dtype,
            device_map={"": device or best_device()},
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        if adapter := adapters.named_in(source):
            model = adapters.attach(model, adapter)
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
    for weight in model.parameters():  # transformers leaves those of a bitsandbytes checkpoint in its own type
        if weight.is_floating_point():
            weight.data = weight.data.to(dtype)
    for module in model.modules():  # bitsandbytes would repack them in place at the first forward (see quant.bnb.guard)
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    tokenizer.padding_side = "left"
    return model.eval(), tokenizer


def refuse_non_finite(model: PreTrainedModel, ref: str) -> None:
    """Raise `CheckpointError` on the first tensor that holds a NaN or an infinity."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        bad = int((~torch.isfinite(tensor)).sum())
        if bad:
            raise CheckpointError(
                f"checkpoint {ref} has {bad} weights that are not finite in {name}: train it again with a lower learning rate."
            )


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, card: str) -> Path:
    """Write model, tokenizer and a model card (`card` is its text) into `folder`, full-precision weights in bfloat16.

    Those weights are then rounded in memory too: the model that goes on is the one on the disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    refuse_non_finite(model, str(folder))
    weights = [p for p in model.parameters() if p.is_floating_point()]
    kinds = [p.dtype for p in weights]
    for weight in weights:  # not model.to(): that would round the rotary tables too, and bitsandbytes refuses it
        weight.data = weight.data.to(torch.bfloat16)
    if adapters.has_adapter(model):
        adapters.save(model, folder)
    else:
        model.save_pretrained(folder)
    for weight, kind in zip(weights, kinds, strict=True):
        weight.data = weight.data.to(kind)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n\n{card}\n"
    )
    return folder


def count_parameters(model: PreTrainedModel) -> int:
    """Number of weights, packed or not, a tied matrix counted once."""
    packed = [m for m in model.modules() if hasattr(m, "in_features") and not holds_numbers(m)]
    plain = sum(p.numel() for p in model.parameters() if p.is_floating_point())
    return plain + sum(m.in_features * m.out_features for m in packed)


def holds_numbers(layer: torch.nn.Module) -> bool:
    """Whether a linear layer's weight is floating-point numbers, and not codes."""
    weight = getattr(layer, "weight", None)
    return weight is not None and weight.is_floating_point()
