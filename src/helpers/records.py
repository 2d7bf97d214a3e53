"""What a run leaves behind: `result.json`, its schema, and how it is written and read.

`result.json` is the only proof that a run succeeded. It is written last, by `write_json` (temporary file, fsync,
rename), and it lists the sha256 of every other file of the run. `helpers/result.schema.json` is this model's JSON
schema.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from helpers.errors import UserError

LARGE = 64 * 2**20  # bytes; hashing larger files at every look would take seconds


class RunError(UserError):
    """A run cannot be found, read or started."""


class FailedRun(RunError):
    """A run was started and failed."""

    exit_code = 1


class Interrupted(FailedRun):
    """A run was stopped by whoever started it."""


class DiskFull(FailedRun):
    """No space is left where runs are written."""


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False)


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")]  # these become folders: no path may hide in them


class Metric(Strict):
    """One measured value; n problems, k replies a problem, a 95 % interval (None only where nothing was sampled)."""

    metric: str
    value: float
    n: int
    k: int = 1
    ci_low: float | None = None
    ci_high: float | None = None
    task: str = ""
    benchmark: str = ""
    reply_tokens: float | None = None
    detail: dict[str, Any] = {}


class Memory(Strict):
    """Bytes by part; `effective_bits` a weight with scales and zero points; packed, or simulated."""

    parts: dict[str, int]
    total_bytes: int
    effective_bits: float
    packed: bool


class Draft(Strict):
    """What a notebook itself knows when it calls `run.finish()`."""

    model: dict[str, Any] = {}
    metrics: list[Metric] = []
    memory: Memory | None = None
    timings: dict[str, float] = {}
    device: str = "cpu"


class Context(Strict):
    """What is known of a run before it starts."""

    run_id: Name
    study: Name
    name: Name | Literal[""]
    stage: Name
    parameters: dict[str, Any]
    parents: list[str]
    code: str
    command: str
    started: str
    commit: str
    dirty: bool


class Result(Strict):
    """The whole record of a finished run."""

    schema_version: Literal[1] = 1
    run_id: Name
    study: Name
    name: Name | Literal[""]
    stage: Name
    status: Literal["complete"] = "complete"
    parameters: dict[str, Any]
    parents: list[str]
    seed: int | None
    model: dict[str, Any]
    metrics: list[Metric]
    memory: Memory | None
    timings: dict[str, float]
    versions: dict[str, str]
    device: str
    commit: str
    dirty: bool
    code: str
    command: str
    started: str
    files: dict[str, str]

    def __repr__(self) -> str:  # what a notebook shows when its last line is run.finish(...)
        return f"Result({self.run_id}, {len(self.metrics)} metrics)"


def read(path: Path) -> Result:
    """The result of the run in a folder (or of a result.json)."""
    path = path / "result.json" if path.is_dir() else path
    try:
        return Result.model_validate_json(path.read_text())
    except OSError:
        raise RunError(f"{path} cannot be read: the run is not complete.") from None
    except (ValidationError, ValueError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": str(error)}
        where = ".".join(map(str, first["loc"])) or "the file"
        raise RunError(
            f"{path} is not a valid result ({where}: {first['msg']}): delete its folder and run it again."
        ) from None


def is_complete(path: Path) -> bool:
    """Whether a folder holds a valid result and all the files that it lists, unchanged (large ones: there)."""
    try:
        return all(_unchanged(path / name, digest) for name, digest in read(path).files.items())
    except RunError:
        return False


def _unchanged(file: Path, digest: str) -> bool:
    return file.is_file() and (file.stat().st_size > LARGE or sha256(file) == digest)


def hash_files(folder: Path) -> dict[str, str]:
    """sha256 of every file below a folder but result.json, by relative path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / "result.json")
    return {path.relative_to(folder).as_posix(): sha256(path) for path in files}


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file so that a reader sees the old one or the whole new one."""
    write_text(path, json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def ensure_space(path: Path, need: int = 64 * 2**20) -> None:
    """Raise if the disk that holds `path` has less than `need` bytes left."""
    while not path.exists():
        path = path.parent
    free = shutil.disk_usage(path).free
    if free < need:
        raise DiskFull(
            f"Only {free // 2**20} MiB are free in {path}, and a run needs {need // 2**20} MiB: make space first."
        )


@contextmanager
def disk_errors(path: Path):
    """Turn 'no space left' into one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskFull(f"No space is left on the disk that holds {path}: make space and run it again.") from None


def says_disk_full(message: str) -> bool:
    """Whether an error's text, of whatever library, means a full disk."""
    return bool(re.search(r"No space left on device|Disk quota exceeded|os error 28\b", message))
