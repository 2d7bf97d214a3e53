"""What a scheme costs, without a weight at hand: the bytes of a layer by formula, and of a whole model from its
configuration.

A layer has R rows of C weights, G grids a row (or one grid in all). In whole words of 4 bytes:

    uniform   codes R ceil(C b / 32), scales 2 bytes a grid, zero points b bits a grid (none where symmetric)
    nf4       codes RC / 2 bytes, 4 bytes for each block of 64 weights, a table of 64 bytes
    nf4-dq    codes RC / 2 bytes, 1 byte for each block, 4 bytes for each 256 blocks, an offset of 4, tables of 64 and 1,024 bytes
    int8      codes RC bytes, 4 bytes a row
"""

from transformers import PreTrainedModel
from transformers.quantizers.quantizers_utils import should_convert_module

from helpers.kernels import words
from helpers.models.lowbit import BITSANDBYTES, quantization_of, quantized_by
from helpers.models.memory import blueprint, cache_bytes, measure
from helpers.quant.fit import refuse_kinds
from helpers.quant.layers import linear_layers
from helpers.quant.scheme import Scheme, SchemeError, bitsandbytes
from helpers.runs import Memory

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
BLOCK, NESTED_BLOCK = 64, 256  # weights a scale of NF4, scales a nested scale


def stored_parts(rows: int, columns: int, scheme: Scheme) -> tuple[int, int]:
    """(bytes of the codes, bytes of scales, zero points and tables) of a `(rows, columns)` layer.

    Errors: `SchemeError` where groups do not divide a row.
    """
    weights = rows * columns
    if scheme.numbers == "int8":
        return weights, 4 * rows
    if scheme.numbers == "nf4":
        blocks = -(-weights // BLOCK)
        scales = blocks + 4 * -(-blocks // NESTED_BLOCK) + 4 + 1024 if scheme.double else 4 * blocks
        return -(-weights // 2), scales + 64
    grids = weights // scheme.grid_length(rows, columns)
    zeros = 0 if scheme.symmetric else 4 * words(grids, scheme.bits)
    return 4 * rows * words(columns, scheme.bits), 2 * grids + zeros


def planned(model: PreTrainedModel, scheme: Scheme | None = None) -> Memory:
    """The memory of a model that may be without weights: quantized by `scheme`, or as its configuration says that it is.

    Errors: `SchemeError` naming the layer that the scheme does not fit, for a model that no method quantizes, and for a scheme
    where the model is packed already.
    """
    own, kind = quantization_of(model.config), quantized_by(model.config)
    if kind and scheme:
        raise SchemeError(
            f"the model is packed already (by {kind}), so there is no scheme to choose: leave {scheme} out."
        )
    if kind == BITSANDBYTES:
        kept = own.get("llm_int8_skip_modules")
        layers = {name: m for name, m in linear_layers(model).items() if should_convert_module(name, kept)}
        eight, double = bool(own.get("load_in_8bit")), bool(own.get("bnb_4bit_use_double_quant"))
        its_own = bitsandbytes(8 if eight else 4, double=double and not eight)  # others' files may say both
        return measure(model, _parts(layers, its_own)).model_copy(update={"packed": True})
    if scheme is None:
        return measure(model)
    refuse_kinds(model)
    return measure(model, _parts(linear_layers(model, scheme.targets), scheme))


def _parts(layers: dict, scheme: Scheme) -> dict[str, tuple[int, int]]:
    found = {}
    for name, layer in layers.items():
        try:
            found[name] = stored_parts(layer.out_features, layer.in_features, scheme)
        except SchemeError as error:
            raise SchemeError(f"layer {name}: {error}") from None
    return found


def account(ref: str, scheme: Scheme | None, tokens: int = 0, texts: int = 1) -> dict:
    """What `lowbit memory` says of a model (see `models.blueprint`), in bytes.

    Errors: those of `blueprint`, `planned` and `cache_bytes`.
    """
    model = blueprint(ref)
    memory = planned(model, scheme)
    cache = cache_bytes(model.config, tokens, texts) if tokens else 0
    return {
        "model": ref,
        "scheme": str(scheme) if scheme else "as packed" if memory.packed else "bf16",
        "parts": memory.parts,
        "weights_bytes": memory.total_bytes,
        "effective_bits": memory.effective_bits,
        "tokens": tokens,
        "batch": texts,
        "cache_bytes": cache,
        "total_bytes": memory.total_bytes + cache,
    }


def as_text(found: dict) -> str:
    """The same as a table for people."""
    names = {"linear": "linear layers", "scales": "their scales, zeros, tables"}
    lines = [(names.get(part, part), held) for part, held in found["parts"].items() if held]
    lines.append(("weights", found["weights_bytes"]))
    if found["tokens"]:
        lines.append((f"cache of {found['batch']} x {found['tokens']} tokens", found["cache_bytes"]))
        lines.append(("total", found["total_bytes"]))
    wide = max(len(name) for name, _ in lines)
    title = f"{found['model']}, {found['scheme']}: {found['effective_bits']:.2f} bits a weight of the linear layers"
    return "\n".join([title, *(f"  {name:<{wide}}  {in_units(held):>10}" for name, held in lines)])


def in_units(count: int) -> str:
    """Bytes with three digits and a unit: 1,234,567 -> `1.18 MiB`."""
    power = 0
    while count >= 999.5 * 1024**power and power < len(UNITS) - 1:
        power += 1
    value = count / 1024**power
    digits = 3 - len(str(int(value))) if power else 0
    return f"{value:.{max(digits, 0)}f} {UNITS[power]}"
