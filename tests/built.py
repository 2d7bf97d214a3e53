"""Three books for the tests: from made-up runs (`full`), from nothing (`empty`), and as it is published (`real`)."""

from pathlib import Path

import pytest

import synthetic_runs as synthetic
from helpers import project, records
from helpers.report import book, publish

REPOSITORY = "https://github.com/someone/low-bit"  # of the made-up book alone: the real one has no address yet


def tree(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def build(home: Path, prepare=lambda home, patch: None, published: bool = False) -> Path:
    """Build a book in `home`; gives the folder of its pages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWBIT_HOME", str(home))
        patch.delenv("LOWBIT_RUNS", raising=False)
        synthetic.project(home, published)
        prepare(home, patch)
        before = tree(home / "book")
        first = book.build()
        assert tree(home / "book") == before
        assert first.is_file()
        return first.parent


def made_up(home: Path, patch: pytest.MonkeyPatch) -> None:
    shipped = home / "shipped"
    for size in ("xs", "s"):
        job = synthetic.run(home, f"base-{size}", "base", size, "base", 16, study="shipped")
        shipped.mkdir(exist_ok=True)
        (home / "runs" / "shipped" / "base" / job["run_id"]).rename(shipped / f"base-{size}")
    patch.setattr(project, "SHIPPED", shipped)
    synthetic.micro(home, methods=("rtn", "gptq"))
    publish.publish(["micro"])
    synthetic.run(home, "mine", "eval", "s", "rtn", 4, 0.7, study="local")
    by_hand = synthetic.run(home, "by-hand", "eval", "s", "rtn", 3, 0.6, study="local")
    (home / "runs" / "local" / "eval" / by_hand["run_id"] / "run.ipynb").unlink()  # as plain papermill leaves it
    path = home / "runs" / "local" / "eval" / by_hand["run_id"]
    result = records.read(path)
    records.write_json(
        path / "result.json",
        result.model_copy(update={"files": records.hash_files(path)}).model_dump(mode="json"),
    )
    synthetic.evil(home)
    with (home / "CITATION.cff").open("a") as file:
        file.write(f"repository-code: {REPOSITORY}\n")


def nothing(home: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(project, "SHIPPED", home / "none")
