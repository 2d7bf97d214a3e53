"""Read and write checkpoints: Hugging Face layout, safetensors only, no code from the checkpoint, no weight that is not a number.

Full-precision weights are kept in bfloat16, so that "2 bytes a weight" is what lies on the disk; arithmetic runs in float32 unless
told otherwise. Low-bit layers are kept as they are: packed codes, scales and zero points, or what bitsandbytes has. A model with an
adapter is kept as both, and loaded so. Of layers that were trained on a grid, the folder `latent/` holds the float32 weights
that the codes were rounded from: training goes on from them, and nothing else needs them.
"""

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from helpers import runs
from helpers.errors import UserError
from helpers.models import adapters, lowbit, packaged
from helpers.models.device import device as best_device

LATENT = Path("latent") / "model.safetensors"


class CheckpointError(UserError):
    """A checkpoint that is missing, unreadable, not safetensors, not what its configuration says, or with weights not finite."""


def load(
    ref: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Give (model in eval mode, tokenizer) of a run id, a shipped name, a folder, a hub id, or a packaged model (see `packaged`).

    Errors: `CheckpointError` naming the checkpoint and what is wrong with it.
    """
    found = runs.find(str(ref))
    source = str(found / "model" if found else ref)
    more = {}
    try:
        if file := packaged.find(source):
            source, more = str(file.parent), {"gguf_file": file.name}
        else:
            config = AutoConfig.from_pretrained(source, trust_remote_code=False)
            refuse_own_code("config.json", getattr(config, "auto_map", None))
            lowbit.quantized_by(config)
        model, report = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            device_map={"": device or best_device()},
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            **more,
        )
        if more:  # its weights are numbers now
            adapters.unmark(model)
        if adapter := adapters.named_in(source):
            model = adapters.attach(model, adapter)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, **more)
        refuse_own_code("tokenizer_config.json", tokenizer.init_kwargs.get("auto_map"))
        if more:
            packaged.mark(str(ref), tokenizer)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        where = (
            ""
            if Path(source).is_dir() or isinstance(error, UserError)
            else " (there is no such folder here, and no such model could be had from a hub)"
        )
        raise CheckpointError(f"checkpoint {ref} cannot be loaded{where}: {reason}") from error
    refuse_other_tensors(report, str(ref))
    refuse_non_finite(model, str(ref))
    for weight in model.parameters():  # transformers leaves those of a bitsandbytes checkpoint in its own type
        if weight.is_floating_point():
            weight.data = weight.data.to(dtype)
    for module in model.modules():  # bitsandbytes would repack them in place at the first forward (see quant.bnb.guard)
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    tokenizer.padding_side = "left"
    return model.eval(), tokenizer


def latents(ref: str | Path) -> dict[str, torch.Tensor]:
    """The weights `(rows, columns)` that a checkpoint's codes were rounded from, by layer; none unless it was trained so."""
    found = runs.find(str(ref))
    file = Path(found / "model" if found else ref) / LATENT
    return load_file(file) if file.is_file() else {}


def refuse_own_code(file: str, named: dict[str, str] | None) -> None:
    """Raise `CheckpointError` where a checkpoint names Python code of its own: without it, it may be another model than it was."""
    if named:
        raise CheckpointError(f"its {file} names code of its own (auto_map), and code from a checkpoint is never run")


def refuse_other_tensors(report: dict[str, Any], ref: str) -> None:
    """Raise `CheckpointError` where what was read is not what the configuration says, by transformers' report of it."""
    odd = {
        "has {} tensors of another shape than its configuration says": [key for key, *_ in report["mismatched_keys"]],
        "lacks {} tensors": report["missing_keys"],  # they would be random numbers
        "has {} tensors that its configuration has no place for": report["unexpected_keys"],
    }
    for what, keys in odd.items():
        if keys:
            raise CheckpointError(f"checkpoint {ref} {what.format(len(keys))}, the first of them {min(keys)}.")


def refuse_non_finite(model: PreTrainedModel, ref: str) -> None:
    """Raise `CheckpointError` on the first tensor that holds a NaN or an infinity."""
    tables = [(name, t) for name, m in model.named_modules() for t in tables_of(m)]
    low_bit = {*lowbit.low_bit_layers(model), *(name for name, _ in tables)}
    for name, tensor in (*model.named_parameters(), *model.named_buffers(), *tables):
        bad = int((~torch.isfinite(tensor)).sum())
        if bad:
            damaged = name in low_bit or name.rpartition(".")[0] in low_bit
            advice = "it is damaged, make the run again" if damaged else "train it again with a lower learning rate"
            raise CheckpointError(f"checkpoint {ref} has {bad} weights that are not finite in {name}: {advice}.")


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
    if latent := {n: m.latent.contiguous() for n, m in lowbit.low_bit_layers(model).items() if m.latent is not None}:
        (folder / LATENT).parent.mkdir(exist_ok=True)
        save_file(latent, folder / LATENT)
    for weight, kind in zip(weights, kinds, strict=True):
        weight.data = weight.data.to(kind)
    tokenizer.save_pretrained(folder)
    for file in folder.rglob("*.safetensors"):  # the library makes them for their owner alone
        file.chmod(0o666 & ~umask())
    (folder / "README.md").write_text(
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n\n{card}\n"
    )
    return folder


def umask() -> int:
    """The bits of a mode that this process does not give to the files it makes."""
    mask = os.umask(0o077)  # it can only be read by setting it
    os.umask(mask)
    return mask


def count_parameters(model: PreTrainedModel) -> int:
    """Number of weights, packed or not, a tied matrix counted once."""
    packed = [m for m in model.modules() if hasattr(m, "in_features") and not holds_numbers(m)]
    plain = sum(p.numel() for p in model.parameters() if p.is_floating_point())
    return plain + sum(m.in_features * m.out_features for m in packed)


def holds_numbers(layer: torch.nn.Module) -> bool:
    """Whether a linear layer's weight is floating-point numbers, and not codes."""
    weight = getattr(layer, "weight", None)
    return weight is not None and weight.is_floating_point()


def tables_of(layer: torch.nn.Module) -> list[torch.Tensor]:
    """What turns the codes of a layer of bitsandbytes into weights, and lies in no parameter or buffer; nothing of other layers."""
    if not isinstance(layer, torch.nn.Linear):
        return []
    weight, state = layer.weight, getattr(layer.weight, "quant_state", None)
    if state is not None:
        nested = [state.state2.absmax, state.state2.code, state.offset] if state.nested else []
        return [state.absmax, state.code, *nested]
    if not hasattr(weight, "SCB"):
        return []
    moved = weight.SCB is None  # by the first forward of LLM.int8
    return [layer.state.SCB if moved else weight.SCB]
