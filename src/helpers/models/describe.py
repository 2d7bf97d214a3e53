"""What a model is called in a result: its name, how it was made, and on what grid its weights lie.

A recipe lists the steps from the base model on (`base > grpo > rtn`), so a quantized base model and a quantized RL model are never
taken for one another. An evaluation inherits its parent's description; a training or quantizing stage adds its step to it, and
`made_from`, the id of the model that it started from. What is trained is in full precision again, whatever it started from.
"""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from helpers.models.checkpoint import count_parameters
from helpers.models.memory import measure
from helpers.runs import Memory, RunError, RunRef, load_parent

FULL_PRECISION = {"scheme": "bf16", "bits": 16, "group_size": None}


def describe(
    model: PreTrainedModel,
    parent: RunRef | None = None,
    step: str | None = None,
    scheme: Any = None,
    name: str | None = None,
) -> dict[str, Any]:
    """The description of `model`: made from `parent` by `step` (`a > b` for two, None: it is the parent itself).

    `scheme` is the grid that it is on. A parent without a result (a folder or a hub id) counts as a base model in full precision.
    """
    if parent is not None and parent.result is not None:
        about = dict(parent.result.model)
    else:
        name = name or (parent.path or Path(parent.id)).name  # the id of a folder is a hash
        about = {"name": name, "recipe": "base", "method": "base", **FULL_PRECISION}
    about["parameters"] = count_parameters(model)
    if step:
        about |= {
            "recipe": f"{about['recipe']} > {step}",
            "method": step.rpartition(" > ")[2],
            "made_from": parent.id,
            **FULL_PRECISION,
        }
    if scheme is not None:
        grouped = scheme.granularity == "group"
        about |= {"scheme": str(scheme), "bits": scheme.bits, "group_size": scheme.group_size if grouped else None}
    return about


def memory_of(model: PreTrainedModel, parent: RunRef) -> Memory:
    """The memory that the parent's own run measured, or full precision where the parent is no run."""
    if parent.result is not None and parent.result.memory is not None:
        return parent.result.memory
    return measure(model)


def full_precision(parent: RunRef) -> RunRef:
    """The nearest model in full precision that `parent` was made from, itself if it is one: what a quantized model is to be like.

    Errors: `RunError` where the line of parents ends before there is one.
    """
    found = parent
    while found.result is not None and found.result.model["bits"] != FULL_PRECISION["bits"]:
        made_from = found.result.model.get("made_from")
        if not made_from:
            raise RunError(f"teacher is empty, and no model in full precision is known that {parent.id} was made from.")
        if made_from.startswith(
            "folder:"
        ):  # the id of a folder is a hash; the run that started from it knows where it is
            made_from = found.result.parameters["parent"]
        found = load_parent(made_from, "model that the parent was made from,")
    return found
