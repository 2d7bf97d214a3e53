"""Parameters: declared once, in the first code cell of a stage template, and enforced everywhere.

Each line of that cell declares one parameter, `name: type = literal # constraint: help`, for example

    parent: str = "base-s"      # a run id, a folder or a hub id
    bits: int = 4               # in 2, 3, 4, 8: width of a weight
    lr: float = 1e-5            # 1e-8..1: learning rate
    tasks: list[str] = ["a"]    # in a, b: what to evaluate

The constraint is a choice (`in ...`) or an inclusive range (`lo..hi`, `lo..`); for a list it holds for each element.
papermill ignores the types, and only warns of a name that does not exist. So the second cell calls `check()`, which
reads the declarations from the kernel's own history; `validate()` does the same before a kernel starts. Text is
converted with pydantic's rules ("3" -> 3, "1e-6" -> 0.000001, "false" -> False), then compared with the constraint.
"""

import ast
import difflib
import io
import json
import re
import sys
import tokenize
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from helpers.errors import UserError
from helpers.values import SCALARS, TYPES, Param, convert, scalar, text

__all__ = ["Param", "ParameterError", "changed", "check", "declared", "template", "text", "validate"]

NUMBER = r"-?\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?"
RANGE = re.compile(rf"({NUMBER})\.\.({NUMBER})?\s*:\s*(.*)")
CHOICE = re.compile(r"in\s+([^:]+):\s*(.*)")
BROKEN = re.compile(rf"{NUMBER}\.\.|in\s")  # begins like a constraint; without its colon it would pass for help


class ParameterError(UserError):
    """A parameter, or its declaration, is not allowed."""


# --- declarations -----------------------------------------------------------------------------------------------------


def declared(cell_source: str) -> dict[str, Param]:
    """The parameters that a cell declares, in order."""
    found: dict[str, Param] = {}
    for line in cell_source.splitlines():
        if line.strip() and not line.strip().startswith("#"):
            param = _declaration(line.strip())
            if param.name in found:
                raise ParameterError(f"{param.name} is declared twice in the parameters cell.")
            found[param.name] = param
    return found


def template(path: Path) -> dict[str, Param]:
    """The parameters of a stage template: its first code cell, which must be tagged `parameters`."""
    for cell in code_cells(path):
        if "parameters" in cell["metadata"].get("tags", []):
            return declared(source(cell))
        break
    raise ParameterError(f"The first code cell of {path} is not tagged parameters.")


def code_cells(path: Path) -> list[dict]:
    """The code cells of a notebook file."""
    try:
        return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ParameterError(f"{path} cannot be read as a notebook: {type(error).__name__}: {error}.") from None


def source(cell: dict) -> str:
    """A cell's text (files store a list of lines)."""
    return cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])


def _declaration(line: str) -> Param:
    def malformed(why: str) -> ParameterError:
        return ParameterError(f"The parameters cell has the line `{line}`: {why}.")

    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(line).readline))
        comment = next((token for token in tokens if token.type == tokenize.COMMENT), None)
        code = line[: comment.start[1]] if comment else line
        (statement,) = ast.parse(code.strip()).body
    except (tokenize.TokenError, SyntaxError, ValueError):
        raise malformed("each parameter is one line, `name: type = value  # help`") from None
    if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value):
        raise malformed("each parameter is written `name: type = value  # help`")
    name, kind = statement.target.id, ast.unparse(statement.annotation)
    if kind not in TYPES:
        raise malformed(f"the type {kind} is not one of {', '.join(TYPES)}")
    if code.count("=") != 1:
        raise malformed("a default cannot contain `=`, because papermill would not see it")
    try:
        default = ast.literal_eval(statement.value)
    except ValueError:
        raise malformed("the default must be a literal") from None
    choices, low, high, text = _constraint(comment.string.lstrip("#").strip() if comment else "", kind, malformed)
    param = Param(name, kind, default, choices, low, high, text)
    try:
        value = convert(param, default)
    except ValueError:
        raise malformed(f"the default {default!r} is not allowed: {param.allowed[:-1]}") from None
    # "3" and 3.0 convert to 3, but a default is written in its own type; only a float may be written 1
    if value != default or ("float" not in kind and repr(value) != repr(default)):
        raise malformed(f"the default {default!r} is not of type {kind}")
    return Param(name, kind, value, choices, low, high, text)


def _constraint(text: str, kind: str, malformed) -> tuple[tuple | None, float | None, float | None, str]:
    item_type = kind.removeprefix("list[").removesuffix("]")
    if match := CHOICE.fullmatch(text):
        try:
            return tuple(scalar(item_type, item.strip()) for item in match[1].split(",")), None, None, match[2]
        except ValueError:
            raise malformed(f"a choice is not of type {item_type}") from None
    if match := RANGE.fullmatch(text):
        if item_type not in ("int", "float"):
            raise malformed("only numbers have a range")
        number = SCALARS[item_type].validate_python
        try:
            return None, number(match[1]), number(match[2]) if match[2] else None, match[3]
        except ValidationError:
            raise malformed(f"a limit of the range is not of type {item_type}") from None
    if BROKEN.match(text):
        raise malformed("a constraint is `in a, b: help`, `low..high: help` or `low..: help`")
    return None, None, None, text


# --- values -----------------------------------------------------------------------------------------------------------


def validate(declarations: dict[str, Param], given: dict[str, Any], stage: str = "") -> dict[str, Any]:
    """All parameters, converted and checked, with defaults for those not given."""
    unknown(declarations, given, stage)
    result = {}
    for name, param in declarations.items():
        value = given.get(name, param.default)
        try:
            result[name] = convert(param, value)
        except ValueError as error:
            shown = error.args[0] if error.args else value
            shown = repr(shown) if isinstance(shown, str) else str(shown)
            shown = shown if len(shown) <= 60 else shown[:57] + "..."
            where = f" for {stage}" if stage else ""
            raise ParameterError(f"{name} = {shown} is not allowed{where}: {param.allowed}") from None
    return result


def unknown(declarations: dict[str, Param], names, stage: str = "") -> None:
    """Raise for the first name that is not declared."""
    for name in names:
        if name not in declarations:
            near = difflib.get_close_matches(name, list(declarations), n=1)
            hint = f"; did you mean {near[0]}? It" if near else "; it"
            what = f"a parameter of {stage}" if stage else "a parameter of this notebook"
            raise ParameterError(f"{name} is not {what}{hint} takes: {', '.join(declarations)}.")


def changed(declarations: dict[str, Param], parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters that differ from their defaults."""
    return {name: value for name, value in parameters.items() if value != declarations[name].default}


# --- inside a notebook ------------------------------------------------------------------------------------------------


def check(namespace: dict[str, Any] | None = None) -> dict[str, Any]:
    """Check the parameters of the running notebook, write the converted values back, and return them.

    The last parameters cell that ran counts, and what papermill injected after it: so a cell that was edited and run
    again in Jupyter is what is checked.
    """
    namespace = sys._getframe(1).f_globals if namespace is None else namespace
    history = [cell for cell in namespace.get("In", []) if cell.strip()]
    places = [index for index, cell in enumerate(history) if is_declarations(cell)]
    if not places:
        raise ParameterError("params.check() finds no parameters cell: run the notebook's first code cell first.")
    declarations = declared(history[places[-1]])
    injected = [cell for cell in history[places[-1] + 1 :] if is_injected(cell)]
    if injected:
        unknown(declarations, _assigned(injected[-1]))
    values = validate(declarations, {name: namespace[name] for name in declarations if name in namespace})
    namespace.update(values)
    return values


def is_declarations(cell: str) -> bool:
    """Whether a cell is nothing but assignments, at least one of them annotated."""
    body = _statements(cell)
    return any(isinstance(line, ast.AnnAssign) for line in body) and all(
        isinstance(line, (ast.AnnAssign, ast.Assign)) for line in body
    )


def is_injected(cell: str) -> bool:
    """Whether papermill wrote this cell."""
    return cell.lstrip().startswith("# Parameters") and all(isinstance(line, ast.Assign) for line in _statements(cell))


def _assigned(cell: str) -> list[str]:
    return [target.id for line in _statements(cell) for target in line.targets if isinstance(target, ast.Name)]


def _statements(cell: str) -> list[ast.stmt]:
    try:
        return ast.parse(cell).body
    except SyntaxError:  # a magic, or a cell that failed
        return []
