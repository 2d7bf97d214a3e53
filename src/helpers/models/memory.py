"""What a model weighs: bytes by part, bits for each quantized weight, and the cache that grows while it writes.

Counted is what the modules hold. A low-bit layer has its codes (`linear`) and what turns them into weights (`scales`:
scales, zero points, tables); everything else counts 2 bytes a weight (bfloat16, as on the disk), a tied matrix once.
`packed` says that low-bit layers are there. What a model would weigh can be counted on a model without weights, too.

The cache holds a key and a value of `head_dim` numbers, 2 bytes each, for each layer, key-value head, token and text; a
layer with a sliding window keeps the last tokens alone:

    bytes = sum over layers of 2 * key-value heads * head_dim * min(tokens, window) * texts * 2
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from helpers import runs
from helpers.kernels import LowBitLinear
from helpers.models import lowbit
from helpers.models.checkpoint import CheckpointError, tables_of
from helpers.runs import Memory

FULL_PRECISION_BYTES = 2
Bytes = tuple[int, int]  # of codes, and of scales, zero points and tables


def measure(model: PreTrainedModel, simulated: Mapping[str, Bytes] | None = None) -> Memory:
    """The memory of `model`, of which the linear layers in `simulated` (by name) count with the bytes given there.

    `effective_bits` is the mean over the weights of the low-bit layers, with their scales; 16 where there are none.
    """
    held = {name: bytes_ for name, m in model.named_modules() if (bytes_ := stored(m)) is not None}
    low_bit = held | dict(simulated or {})
    codes, scales = (sum(part) for part in zip(*low_bit.values(), strict=True)) if low_bit else (0, 0)
    parts = {"embeddings": 0, "linear": codes, "scales": scales, "other": 0}
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    embeddings = {p for m in model.modules() if m in ends or isinstance(m, nn.Embedding) for p in m.parameters()}
    for name, parameter in model.named_parameters():  # tied parameters are listed once
        if name.removesuffix(".weight") not in low_bit:
            part = "embeddings" if parameter in embeddings else "linear" if parameter.ndim > 1 else "other"
            parts[part] += parameter.numel() * FULL_PRECISION_BYTES
    layers = [model.get_submodule(name) for name in low_bit]
    weights = sum(layer.in_features * layer.out_features for layer in layers)
    bits = 8 * (codes + scales) / weights if weights else 8.0 * FULL_PRECISION_BYTES
    return Memory(parts=parts, total_bytes=sum(parts.values()), effective_bits=bits, packed=bool(held))


def stored(layer: nn.Module) -> Bytes | None:
    """What a low-bit layer holds, ours or bitsandbytes' (whose weight keeps its scales with it), bias aside; None for any other."""
    if isinstance(layer, LowBitLinear):
        tables = sum(t.nbytes for t in (layer.scale, layer.zero) if t is not None)
        return layer.nbytes - tables, tables
    if not isinstance(layer, nn.Linear) or layer.weight.is_floating_point():
        return None
    return layer.weight.data.nbytes, sum(t.nbytes for t in tables_of(layer))


def blueprint(ref: str) -> PreTrainedModel:
    """The model of a run id, study/name, shipped name, folder or hub id, without weights: from its configuration alone.

    It is on the meta device, with packed layers of ours in place.

    Errors: `RunError` where nothing has this name, `CheckpointError` where it is no language model that transformers knows, and
    where its low-bit layers are another software's or make no sense.
    """
    here = (Path(ref).expanduser() / "config.json").is_file()
    source = str(Path(ref).expanduser()) if here else runs.load_parent(ref, what="model").model_path
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        if lowbit.quantized_by(config) == lowbit.NAME:
            packed = lowbit.LowBitConfig(**lowbit.quantization_of(config))
            lowbit.LowBitQuantizer(packed)._process_model_before_weight_loading(model)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise CheckpointError(f"The configuration of {ref} cannot be used: {reason}.") from error
    return model


def cache_bytes(config: PreTrainedConfig, tokens: int, texts: int = 1) -> int:
    """Bytes of the keys and values of `texts` texts of `tokens` tokens each, in 16 bit.

    Errors: `CheckpointError` for more tokens than the model has positions, and for layers that keep something else.
    """
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if longest and tokens > longest:
        raise CheckpointError(f"tokens = {tokens} is more than the {longest} positions of the model.")
    window = getattr(text, "sliding_window", None)
    usual = "sliding_attention" if window else "full_attention"
    kinds = getattr(text, "layer_types", None) or [usual] * text.num_hidden_layers
    other = next((kind for kind in kinds if kind not in ("full_attention", "sliding_attention")), None)
    if other or getattr(text, "kv_lora_rank", None):
        raise CheckpointError(
            f"The cache of {other or 'latent attention'} layers is not known here: leave the tokens out."
        )
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kept = sum(min(tokens, window) if kind == "sliding_attention" else tokens for kind in kinds)
    return 2 * heads * size * kept * texts * FULL_PRECISION_BYTES
