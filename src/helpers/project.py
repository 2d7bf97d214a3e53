"""Where things are: the project folder, its stage templates and studies, the runs, the git commit.

The project folder is `LOWBIT_HOME`, else the checkout that holds this package, else the first folder above the current
one that has `notebooks/studies`. Runs go to `LOWBIT_RUNS`, else `runs/` in the project folder.
"""

import difflib
import os
import subprocess
from pathlib import Path

from helpers.errors import UserError

PACKAGE = Path(__file__).parent
SHIPPED = PACKAGE / "models" / "shipped"


def root() -> Path:
    """The project folder."""
    if home := os.environ.get("LOWBIT_HOME"):
        if not (Path(home) / "notebooks").is_dir():
            raise UserError(f"LOWBIT_HOME = {home} is not a project folder: it has no notebooks folder.")
        return Path(home).resolve()
    checkout = PACKAGE.parents[1]
    if (checkout / "notebooks").is_dir():
        return checkout
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "notebooks" / "studies").is_dir():
            return folder
    raise UserError(
        f"No project folder at or above {here}: go to a checkout of the project, or set LOWBIT_HOME to one."
    )


def runs_dir() -> Path:
    """The folder of local runs; it may not exist yet."""
    return Path(os.environ["LOWBIT_RUNS"]).resolve() if os.environ.get("LOWBIT_RUNS") else root() / "runs"


def templates() -> dict[str, Path]:
    """Stage -> notebook, in the order of their numbers: {"base": .../01_base.ipynb, ...}."""
    return {path.stem[3:]: path for path in sorted((root() / "notebooks").glob("[0-9][0-9]_*.ipynb"))}


def template(stage: str) -> Path:
    """The notebook of a stage."""
    known = templates()
    if stage not in known:
        raise UserError(f"{stage} is not a stage{did_you_mean(stage, known)} choose one of {', '.join(known)}.")
    return known[stage]


def studies() -> dict[str, Path]:
    """Study name -> YAML file."""
    return {path.stem: path for path in sorted((root() / "notebooks" / "studies").glob("*.yml"))}


def did_you_mean(word: str, known) -> str:
    """'; did you mean X?' for a near match, else ':' (both continue a sentence)."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}? Or" if near else ":"


def commit() -> tuple[str, bool]:
    """(git commit of the project folder, whether code or notebooks have uncommitted changes).

    A copy without its history, in a container image say, is told its commit by LOWBIT_COMMIT; else it is "unknown".
    """
    if given := os.environ.get("LOWBIT_COMMIT"):
        return given, False
    try:
        sha = _git("rev-parse", "HEAD")
        return sha, bool(_git("status", "--porcelain", "--", "src", "notebooks"))
    except (OSError, subprocess.SubprocessError):
        return "unknown", False


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(root()), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.strip()
