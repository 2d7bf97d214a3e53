"""From a run to a folder in another format: what is exported is checked first, and the folder appears whole or not at all.

Weights that are not quantized are written in float16, like the scales; a bfloat16 number of usual size is a float16 one, so
nothing is lost. A tied output head is not written: the readers tie it again.
"""

import copy
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from torch import nn
from transformers import PreTrainedModel

from helpers import models, records, runs
from helpers.errors import UserError
from helpers.models import adapters
from helpers.models.lowbit import BITSANDBYTES, low_bit_layers, quantization_of, quantized_by
from helpers.quant.export import awq, bnb, compressed_tensors, gptq
from helpers.quant.export.grids import Kind, kind_of

FORMATS = {"gptq": gptq, "awq": awq, "compressed-tensors": compressed_tensors, "bnb": bnb}


class ExportError(UserError):
    """A run that cannot be exported, or not in this format, or not to this place."""


def export(ref: str, format: str, out: Path) -> Path:
    """Write the packed model of a run (run id, study/name or folder) into the folder `out`, in `format`.

    Errors: `ExportError` for an unknown format, a folder that is not empty, a run in full precision or with an adapter, and a
    model that the format cannot hold, naming those that can; nothing is written then.
    """
    if format not in FORMATS:
        raise ExportError(f"format = {format} is unknown: choose one of {', '.join(FORMATS)}.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ExportError(f"{out} is there already and is no empty folder: name a new one.")
    run = runs.load_parent(ref, what="run")
    model, tokenizer = models.load(run.model_path)
    kind = check(model, run, format)
    text = card(run, scheme_of(model, run), format)
    with whole_folder(out) as folder:
        if kind is None:
            bnb.copy_files(Path(run.model_path), folder)
        else:
            write(model, kind, format, folder)
            tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(
            f"---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n\n{text}\n"
        )
        mode = (folder / "README.md").stat().st_mode
        for file in folder.iterdir():  # safetensors writes for its owner alone
            file.chmod(mode)
    return out


def check(model: PreTrainedModel, run: runs.RunRef, format: str) -> Kind | None:
    """What the layers of the model have in common; None where they are bitsandbytes' and so is the format.

    Errors: see `export`.
    """
    layers, name = low_bit_layers(model), run.label if run.result else run.ref
    own = quantized_by(model.config) == BITSANDBYTES
    if not layers and not own:
        raise ExportError(f"There is nothing to export: {name} is in full precision.")
    kind = kind_of(layers) if layers else None
    if adapters.has_adapter(model):
        raise ExportError(
            f"{name} has an adapter beside its weights, which no format holds: merge it, and quantize what comes out."
        )
    if own and run.path is None:
        raise ExportError(f"{name} is on a hub in the format of bitsandbytes already: there is nothing to export.")
    if layers and kind is None:
        raise ExportError(
            f"{name} cannot be exported: its layers differ in bits or symmetry, and a format holds one scheme."
        )
    if own:
        reasons = dict.fromkeys(FORMATS, bnb.ELSEWHERE) | {"bnb": ""}
    else:
        reasons = {key: module.objection(kind, layers) for key, module in FORMATS.items()}
    if reasons[format]:
        *most, last = [key for key, reason in reasons.items() if not reason] or ["no other format"]
        others = f"{', '.join(most)} and {last}" if most else last
        raise ExportError(f"{format} cannot hold {scheme_of(model, run)}: {reasons[format]}; {others} can.")
    return kind


def scheme_of(model: PreTrainedModel, run: runs.RunRef) -> str:
    """How the scheme is written: by the run, or as the layers have it."""
    if run.result and run.result.model.get("scheme"):
        return run.result.model["scheme"]
    if layers := low_bit_layers(model):
        kind = kind_of(layers)
        return kind.name if kind else "mixed"
    about = quantization_of(model.config)
    return "int8" if about["load_in_8bit"] else "nf4-dq" if about["bnb_4bit_use_double_quant"] else "nf4"


def write(model: PreTrainedModel, kind: Kind, format: str, folder: Path) -> None:
    """Tensors and configuration."""
    layers, module = low_bit_layers(model), FORMATS[format]
    kind = module.written(kind, layers)
    state = {f"{name}.{part}": t for name, m in layers.items() for part, t in module.tensors(m, kind).items()}
    for name, tensor in model.named_parameters():  # a tied matrix is listed once, by its first name
        state[name] = halved(name, tensor)
    save_torch_state_dict(state, folder)
    kept = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    config = copy.deepcopy(model.config)
    config.dtype, config.quantization_config = torch.float16, module.config(kind, layers, kept)
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def halved(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float16.

    Errors: `ExportError` where a number is too large for it.
    """
    half = tensor.detach().half().cpu().contiguous()
    if not torch.isfinite(half).all():
        raise ExportError(f"{name} cannot be exported: it holds a number beyond float16.")
    return half


def card(run: runs.RunRef, scheme: str, format: str) -> str:
    """The text of the model card: what it is, of which run, and how to load it."""
    if run.result:
        name, origin = run.result.model.get("name", run.id), f"run {run.id}, made by `{run.result.command}`"
    else:
        name = Path(run.ref).name
        origin = f"the model {name}"
    return f"""# {name}, {scheme}, in the format {format}

Exported from {origin}, by Low-Bit Reasoning. Its linear layers are quantized, scheme {scheme}; everything else is in 16 bit.
It is read by {FORMATS[format].READERS}:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("this/folder", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("this/folder")
```"""


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A new folder beside `out` that takes its name once everything is in it, and is removed if something goes wrong.

    So are the folders above that were made for it. A link to a folder stays a link.

    Errors: `DiskFull`, and `ExportError` where the folder cannot be written for another reason.
    """
    place = out.resolve()
    made = place.with_name(f".{place.name}.{os.getpid()}")
    new = [folder for folder in place.parents if not folder.exists()]  # the innermost first
    try:
        with records.disk_errors(out):
            made.mkdir(parents=True)
            yield made
            os.rename(made, place)
    except BaseException as error:
        shutil.rmtree(made, ignore_errors=True)
        for folder in new:
            with suppress(OSError):  # another one's files are in it by now
                folder.rmdir()
        if isinstance(error, OSError):
            raise ExportError(f"{out} cannot be written: {error.strerror or error}.") from error
        raise
