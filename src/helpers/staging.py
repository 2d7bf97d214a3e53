"""From a staging folder to a published run.

A run is made in `runs/.staging/` and becomes visible by one rename, so nobody ever sees half of one, and a run that
fails does not harm the good one of the same id. A lock for each id keeps two makers apart; the system frees it when its
holder dies.
"""

import ctypes
import os
import re
import shutil
import socket
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from helpers import project
from helpers.records import Result, RunError, disk_errors, hash_files, is_complete, write_json

CONTEXT, DRAFT = ".context.json", ".draft.json"  # the runner's own files in a staging folder
PREFIX = "lowbit-"  # of a folder of sockets
SOCKETS = ".sockets"  # there while a kernel runs: a link to the folder of its sockets, which need a short path


@contextmanager
def lock(run_id: str, waiting=lambda: None) -> Iterator[None]:
    """Hold the lock of a run id; `waiting` is called if someone else holds it."""
    path = project.runs_dir() / ".locks" / f"{run_id}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    held = FileLock(path)
    try:
        held.acquire(timeout=0)
    except Timeout:
        waiting()
        held.acquire()
    try:
        yield
    finally:
        held.release()


def stage_folder(run_id: str) -> Path:
    """A new staging folder; the caller holds the lock, so what an earlier, killed run of this id left is removed."""
    parent = project.runs_dir() / ".staging"
    for stale in parent.glob(f"{run_id}.*"):
        remove_linked(stale / SOCKETS)
        shutil.rmtree(stale, ignore_errors=True)
    folder = parent / f"{run_id}.{uuid.uuid4().hex[:8]}"
    folder.mkdir(parents=True)
    return folder


def remove_linked(link: Path) -> None:
    """Remove the folder of sockets that a killed process left. A link that leads to anything else was put there by a notebook."""
    if (
        link.is_symlink()
        and (folder := link.readlink()).name.startswith(PREFIX)
        and folder.parent in temporary_folders()
    ):
        shutil.rmtree(folder, ignore_errors=True)


def temporary_folders() -> set[Path]:
    """Where folders of sockets may lie."""
    return {Path(tempfile.gettempdir()), Path("/tmp")}


def unfinished_folder(run_id: str) -> Path:
    """Where a run may keep what a later attempt at it goes on from; it is removed when the run is published."""
    return project.runs_dir() / ".unfinished" / run_id


def session_folder() -> Path:
    """A staging folder for a notebook without a runner; those of sessions of this machine that ended are removed."""
    parent, host = project.runs_dir() / ".staging", re.sub(r"[^\w-]", "-", socket.gethostname())
    for stale in parent.glob(f"session.{host}.*"):
        pid = int(stale.name.split(".")[2])
        if pid != os.getpid() and not Path(f"/proc/{pid}").exists() and Path("/proc").exists():
            shutil.rmtree(stale, ignore_errors=True)
    folder = parent / f"session.{host}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
    folder.mkdir(parents=True)
    return folder


def publish_staged(staging: Path, result: Result, replace: bool = False) -> Path:
    """Make a staged run visible: files hashed, result.json last, one rename. A valid run stays unless `replace`."""
    target = project.runs_dir() / result.study / result.stage / result.run_id
    if links := sorted(path.relative_to(staging).as_posix() for path in staging.rglob("*") if path.is_symlink()):
        raise RunError(f"{result.run_id} left a link, {links[0]}: a run is files of its own.")
    with disk_errors(target):
        for name in (CONTEXT, DRAFT):
            (staging / name).unlink(missing_ok=True)
        write_result(staging, result)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            os.rename(staging, target)
            return target
        if replace or not is_complete(target):
            _exchange(staging, target)
    shutil.rmtree(staging, ignore_errors=True)  # the old run after an exchange, else the copy that is not needed
    return target


def write_result(folder: Path, result: Result) -> None:
    data = result.model_copy(update={"files": hash_files(folder)}).model_dump(mode="json")
    write_json(folder / "result.json", data)


def _exchange(one: Path, other: Path) -> None:
    """Swap two folders: at once where the system can (Linux), else by three renames."""
    try:
        renameat2, here, flag = ctypes.CDLL(None).renameat2, -100, 2  # AT_FDCWD, RENAME_EXCHANGE
        if renameat2(here, os.fsencode(one), here, os.fsencode(other), flag) == 0:
            return
    except (AttributeError, OSError, TypeError):
        pass
    aside = one.with_name(one.name + ".old")
    os.rename(other, aside)
    os.rename(one, other)
    os.rename(aside, one)
