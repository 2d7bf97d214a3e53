"""The command line, `lowbit`. It starts without machine learning: models live in the kernels of the runs.

Only `export`, `memory` and `bench` import it, when they are called.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from helpers.errors import UserError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Low-Bit Reasoning: run a stage, run a study, look at results, build the book.",
)
Params = Annotated[
    list[str] | None, typer.Option("-p", "--param", metavar="NAME=VALUE", help="A parameter; may be repeated.")
]


@app.command()
def check(
    runs: Annotated[bool, typer.Option("--runs", help="Check every run instead: files, schema, id, parents.")] = False,
) -> None:
    """Check versions, stage templates, studies and disk space, or all runs."""
    from helpers import checks, integrity

    number, problems = integrity.broken() if runs else (0, checks.problems())
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        raise typer.Exit(1)
    print(f"All is well with {number:,} runs." if runs else "All is well.")


@app.command()
def run(
    stage: Annotated[str, typer.Argument(help="base, grpo, ptq, qat, eval, diagnose, pareto, speed")],
    param: Params = None,
    processes: Annotated[int, typer.Option(help="For grpo and qat: train in so many, each on a GPU of its own.")] = 0,
) -> None:
    """Run one stage with parameters, or find it done."""
    from helpers import processes as several
    from helpers import runs
    from helpers.execute import execute

    if processes:
        several.ask(processes, stage)
    outcome = execute(stage, _pairs(param))
    print(
        f"{outcome.run_id}: {'already done' if outcome.state == 'skipped' else 'done'}, in {runs.shown(outcome.path)}"
    )
    for metric in runs.read(outcome.path).metrics:
        print(f"  {_metric(metric)}")


@app.command()
def study(
    names: Annotated[list[str], typer.Argument(metavar="STUDY...", help="Names of studies, or their YAML files.")],
    jobs: Annotated[int, typer.Option(min=1, help="Runs side by side.")] = 2,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would run, and what it takes.")] = False,
    smoke: Annotated[bool, typer.Option("--smoke", help="Every run, on tiny random models: does it work?")] = False,
    gpu_gib: Annotated[float, typer.Option(min=0, help="Memory of a GPU; 0: of the one here.")] = 0,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Only runs of such names, and what they need; may be repeated."),
    ] = None,
    profile: Annotated[
        str, typer.Option(help="Where jobs run: local, slurm, kubernetes, or a folder with a config.yaml of yours.")
    ] = "local",
) -> None:
    """Run what is missing of studies, one after another."""
    from helpers.schedule import run_study

    if gpu_gib == float("inf"):
        raise UserError("--gpu-gib inf is not allowed: give the memory of a GPU in GiB, or 0 for the one here.")
    if not all([run_study(name, jobs, dry_run, smoke, gpu_gib, only or (), profile) for name in names]):
        raise typer.Exit(1)


@app.command(hidden=True)
def job(plan: Path, name: str, parent: int) -> None:
    """One run of a study's plan (Snakemake calls this)."""
    from helpers import kernel, project
    from helpers.schedule import run_job

    kernel.die_with_parent(signal.SIGTERM, parent)
    os.chdir(project.root())
    run_job(plan, name)


@app.command()
def table() -> None:
    """Write runs/results.csv from the local runs."""
    from helpers import runs
    from helpers.report import table as report

    print(runs.shown(report.write()))


@app.command()
def book() -> None:
    """Build the book with published and local runs."""
    from helpers.report import book as report

    print(report.build())


@app.command()
def lesson() -> None:
    """Write the stages' copies for class, headings and code alone."""
    from helpers import runs
    from helpers.report import lesson as report

    for path in report.write():
        print(runs.shown(path))


@app.command()
def publish(refs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run ids or study/name.")]) -> None:
    """Copy checked runs into the book."""
    from helpers.report import publish as report

    for name in report.publish(refs):
        print(f"book/runs/{name}")


@app.command()
def show(
    ref: Annotated[str, typer.Argument(metavar="RUN", help="A run id, study/name, shipped name or folder.")],
) -> None:
    """Show what a run was made from and what came out."""
    from helpers import runs

    found = runs.load_parent(ref, what="run")
    if (result := found.result) is None:
        raise runs.RunError(f"{ref} is not a run of this project, so there is nothing to show.")
    changes = " with uncommitted changes" if result.dirty else ""
    lines = [
        ("run", result.run_id),
        ("name", f"{result.study}/{result.name}" if result.name else result.study),
        ("folder", runs.shown(found.path)),
        ("parents", ", ".join(result.parents) or "none"),
        ("command", result.command),
        ("made", f"{result.started}, {result.timings['wall_s']:.1f} s, {result.device}"),
        ("code", f"{result.code}, commit {result.commit[:10]}{changes}"),
    ]
    lines += [("parameter", f"{name} = {value}") for name, value in result.parameters.items()]
    lines += [("model", f"{name} = {value}") for name, value in result.model.items()]
    if memory := result.memory:
        kind = "packed" if memory.packed else "full precision" if memory.effective_bits == 16 else "simulated"
        bits = f"{memory.effective_bits:.2f} bits a weight of the linear layers"
        lines.append(("memory", f"{memory.total_bytes:,} bytes, {bits}, {kind}"))
    lines += [("metric", _metric(metric)) for metric in result.metrics]
    last = ""
    for key, value in lines:
        print(f"{'' if key == last else key:<10} {value}")
        last = key


@app.command()
def export(
    ref: Annotated[str, typer.Argument(metavar="RUN", help="A run id, study/name or folder with a packed model.")],
    format: Annotated[str, typer.Option(help="gptq, awq, compressed-tensors or bnb.")],
    out: Annotated[Path, typer.Option(help="A new folder.")],
) -> None:
    """Write a packed model for other software."""
    from helpers import models, runs
    from helpers.quant.export import export as write

    models.seed_everything(0)  # also quiets the libraries
    print(runs.shown(write(ref, format, out)))


@app.command()
def memory(
    ref: Annotated[str, typer.Argument(metavar="MODEL", help="A run id, shipped name, folder or hub id.")],
    scheme: Annotated[str, typer.Option(help="w4g128, w3pc-sym, nf4, ...; without it, the model as it is.")] = "",
    tokens: Annotated[int, typer.Option(min=0, help="Tokens a text, for the cache of keys and values.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Texts side by side.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Bytes as JSON.")] = False,
) -> None:
    """Say what a model weighs at a scheme, from its configuration alone."""
    from helpers import models, runs
    from helpers.quant import Scheme, size

    models.seed_everything(0)
    found = size.account(ref, Scheme.parse(scheme) if scheme else None, tokens, batch)
    print(json.dumps(found) if as_json else size.as_text(found))
    path = runs.find(ref)
    if path and (path / "model" / "adapter").is_dir():
        print("Its adapter is not counted here: `lowbit show` gives the bytes of both.", file=sys.stderr)


@app.command()
def grade(
    cases: Annotated[Path, typer.Argument(metavar="CASES.jsonl", help="Lines of id, gold, pred and form.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Decide whether answers equal their golds."""
    from helpers.grading import cases as grading

    for row in grading.grade(grading.read(cases)):
        line = json.dumps(row, ensure_ascii=False) if as_json else f"{row['outcome']:<10} {row['rule']:<12} {row['id']}"
        print(line.encode(errors="backslashreplace").decode())  # an id may hold half a surrogate pair


@app.command()
def bench(
    work: Annotated[str, typer.Argument(help="linear, rollout, decode, qat, kd, gptq, grpo, grade")],
    repeats: Annotated[int, typer.Option(min=1, help="The median of so many counts.")] = 9,
    as_json: Annotated[bool, typer.Option("--json", help="The rows as JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="A JSON file that the rows are added to.")] = None,
) -> None:
    """Time our code beside what a user would pick instead, in one process."""
    from helpers import bench as benchmarks
    from helpers import records

    if out:
        _rows_in(out)  # before minutes of measuring
    rows = benchmarks.measured(work, repeats)
    print(json.dumps(rows, indent=1) if as_json else "\n".join(map(benchmarks.as_text, rows)))
    if out:
        records.write_json(out, [*_rows_in(out), *rows])


def _rows_in(out: Path) -> list:
    """The rows of a file that measurements are added to; none where it is not there."""
    try:
        found = json.loads(out.read_text()) if out.exists() else []
    except (OSError, ValueError):
        found = None
    if not isinstance(found, list):
        raise UserError(f"{out} is no JSON list that rows could be added to: give another file.")
    return found


def _metric(metric) -> str:
    where = f" {metric.benchmark or metric.task}" if metric.benchmark or metric.task else ""
    interval = f" [{metric.ci_low:.3g}, {metric.ci_high:.3g}]" if metric.ci_low is not None else ""
    return f"{metric.metric}{where} = {metric.value:.4g}{interval} (n = {metric.n}, k = {metric.k})"


def _pairs(given: list[str] | None) -> dict[str, str]:
    """["bits=3"] -> {"bits": "3"}."""
    pairs: dict[str, str] = {}
    for item in given or []:
        name, sign, value = item.partition("=")
        if not sign or not name:
            raise UserError(f"-p {item} is not allowed: write -p name=value.")
        if name in pairs:
            raise UserError(f"{name} is given twice: {pairs[name]} and {value}.")
        pairs[name] = value
    return pairs


def _interrupt(*_) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Entry point: a user error is one sentence, and an exit code of 2 (bad input) or 1 (a failed run)."""
    signal.signal(signal.SIGTERM, _interrupt)  # so that whoever ends us, a kernel is ended and staging removed
    try:
        app()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # `lowbit show X | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:  # a full disk, a folder that may not be written
        print(f"{error.filename or 'A file'} cannot be used: {error.strerror or error}.", file=sys.stderr)
        sys.exit(1)
    except Exception as error:  # what nobody thought of is still one sentence; its traceback is there on request
        if os.environ.get("LOWBIT_DEBUG"):
            raise
        detail = " ".join(str(error).split())[:300]
        print(f"{type(error).__name__}: {detail} (LOWBIT_DEBUG=1 shows where).", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
