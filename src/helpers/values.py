"""One parameter: its type, what it may be, and how text becomes its value.

Text is converted with pydantic's rules ("3" -> 3, "1e-6" -> 0.000001, "false" -> False, "a,b" -> ["a", "b"]), but a
boolean is no number, and a number must be finite. `text` goes the other way: `convert` gives back what it was given.
"""

import ast
import json
import math
import re
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

SCALARS = {"str": TypeAdapter(str), "int": TypeAdapter(int), "float": TypeAdapter(float), "bool": TypeAdapter(bool)}
TYPES = (*SCALARS, "list[str]", "list[int]", "list[float]")
WORDS = {"str": "text", "int": "a whole number", "float": "a number", "bool": "true or false"}
PLURALS = {"str": "texts", "int": "whole numbers", "float": "numbers"}


@dataclass(frozen=True)
class Param:
    """One declaration; `type` is its source text."""

    name: str
    type: str
    default: Any
    choices: tuple | None = None
    low: float | None = None
    high: float | None = None
    help: str = ""

    @property
    def item(self) -> str:
        """The scalar type: of the elements for a list."""
        return self.type.removeprefix("list[").removesuffix("]")

    @property
    def allowed(self) -> str:
        """What a value may be, as the end of a sentence."""
        if self.choices is not None:
            chosen = "from" if self.type.startswith("list") else "one of"
            return f"choose {chosen} {', '.join(map(str, self.choices))}."
        kind = f"a list of {PLURALS[self.item]}" if self.type.startswith("list") else WORDS[self.type]
        if self.low is None:
            return f"it must be {kind}."
        limits = f"of at least {self.low}" if self.high is None else f"from {self.low} to {self.high}"
        return f"it must be {kind} {limits}."


def convert(param: Param, value: Any) -> Any:
    """Raises ValueError(the value as far as it was understood)."""
    if param.type.startswith("list"):
        return [_limited(param, scalar(param.item, item), value) for item in _items(value)]
    converted = scalar(param.type, value)
    return _limited(param, converted, converted)


def _limited(param: Param, value: Any, shown: Any) -> Any:
    bad_choice = param.choices is not None and value not in param.choices
    too_low = param.low is not None and value < param.low
    too_high = param.high is not None and value > param.high
    if bad_choice or too_low or too_high:
        raise ValueError(shown)
    return value


def scalar(kind: str, value: Any) -> Any:
    if isinstance(value, bool) and kind != "bool":  # pydantic would take True for 1
        raise ValueError(value)
    try:
        converted = SCALARS[kind].validate_python(value)
    except ValidationError:
        raise ValueError(value) from None
    if kind == "float" and not math.isfinite(converted):
        raise ValueError(value)
    return converted


def _items(value: Any) -> list:
    """The elements of a list, or of its text: `a,b`, `[a, b]` or `["a", "b"]`."""
    if isinstance(value, (list, tuple)):
        return list(value)
    if not isinstance(value, str):
        raise ValueError(value)
    stripped = value.strip()
    if stripped.startswith("[") and stripped.endswith("]"):
        for parse in (json.loads, ast.literal_eval):
            try:
                return parse(stripped)
            except (ValueError, SyntaxError):
                continue
        stripped = stripped[1:-1]
    return [item.strip() for item in stripped.split(",")] if stripped.strip() else []


def text(value: Any) -> str:
    """A value as `-p name=text` takes it; `validate` gives the value back."""
    if isinstance(value, list):
        plain = value and all(re.fullmatch(r"[\w./@+-]+", str(item)) for item in value)
        return ",".join(map(str, value)) if plain else json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
