"""A small project folder with made-up finished runs, for tests of publishing and of the book.

The values are invented and chosen so that every quoted number can be worked out by hand.
"""

import json
import shutil
from pathlib import Path

import nbformat
import pandas as pd
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from helpers import records
from helpers.records import Memory, Metric, Result

CHECKOUT = Path(__file__).parents[1]
PIXEL = (  # a PNG of one pixel
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
EVIL = (  # what a model might write, and what might stand in a record
    "<script>alert(1)</script><img src=x onerror=alert(1)> </pre></div> $x^2$ \\(y\\) {{ base_s }} {cite}`none` "
    "[a](javascript:alert(1)) `` ``` | ::: {raw} html"
)
SIZES = {"xs": 150_016, "s": 790_272}
ACCURACY = {
    "xs": {"base": 0.20, "grpo": 0.50, 8: 0.50, 4: 0.45, 3: 0.20, 2: 0.01},
    "s": {"base": 0.40, "grpo": 0.75, 8: 0.75, 4: 0.72, 3: 0.60, 2: 0.08},
}
N = 500


def project(home: Path, published: bool = False) -> Path:
    """A project folder with the real book and notebooks, without runs, or with those that are published."""
    for folder in ("book", "notebooks"):
        shutil.copytree(CHECKOUT / folder, home / folder)
    for part in ("runs", "results"):
        if not published:
            shutil.rmtree(home / "book" / part, ignore_errors=True)
    for name in ("_config.yml", "CITATION.cff"):
        shutil.copyfile(CHECKOUT / name, home / name)
    return home


def micro(home: Path, methods: tuple[str, ...] = ("rtn",)) -> list[str]:
    """Finished runs of a micro study with its plan; gives their names. Every method has the same accuracies."""
    jobs = []
    for size in SIZES:
        jobs.append(run(home, f"grpo-{size}", "grpo", size, "grpo", 16))
        for method in methods:
            jobs += [run(home, f"{method}-{size}-{bits}bit", "ptq", size, method, bits) for bits in (8, 4, 3, 2)]
        for arm, value in ACCURACY[size].items():
            if isinstance(arm, str):
                jobs.append(run(home, f"eval-{arm}-{size}", "eval", size, arm, 16, value))
                continue
            for method in methods:
                jobs.append(run(home, f"eval-{method}-{size}-{arm}bit", "eval", size, method, arm, value))
    jobs.append(run(home, "pareto", "pareto", None, "", 0))
    plan = {"study": "micro", "title": "The micro study", "jobs": jobs}
    records.write_json(home / "runs" / "micro" / "plan.json", plan)
    return [job["name"] for job in jobs]


def run(home, name, stage, size, method, bits, value=None, study="micro", notebook=None) -> dict:
    """One finished run; with a `value`, one that measured an accuracy."""
    run_id = f"{stage}-{records.hashlib.sha256(f'{study}/{name}'.encode()).hexdigest()[:10]}"
    folder = home / "runs" / study / stage / run_id
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "model.safetensors").write_bytes(b"weights")
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 0.5}) + "\n")
    nbformat.write(notebook or executed(home, name), folder / "run.ipynb")
    metrics, memory = [], None
    if value is not None:
        spread = {"ci_low": max(0.0, value - 0.04), "ci_high": min(1.0, value + 0.04)}
        common = {"n": N, "k": 1, "task": "arithmetic", "reply_tokens": 31.0}
        metrics = [
            Metric(metric="accuracy", value=value, benchmark="arithmetic", **common, **spread),
            Metric(metric="accuracy", value=value, benchmark="arithmetic/level1", **common, **spread),
            Metric(metric="reward", value=value + 0.1, benchmark="arithmetic", **common, **spread),
        ]
        weights = SIZES[size] * bits // 8
        memory = Memory(parts={"weights": weights}, total_bytes=weights, effective_bits=bits, packed=False)
    result = Result(
        run_id=run_id,
        study=study,
        name=name,
        stage=stage,
        parameters={"parent": "base-s", "seed": 0},
        parents=["base-s-0123456789"],
        seed=0,
        model=_model(size, method, bits) if size else {},
        metrics=metrics,
        memory=memory,
        timings={"wall_s": 12.0},
        versions={"python": "3.11.7", "torch": "2.13.0", "transformers": "5.24.0"},
        device="cpu",
        commit="0123456789abcdef",
        dirty=False,
        code="c0de",
        command=f"lowbit run {stage} -p parent=base-s",
        started="2026-01-02T03:04:05+00:00",
        files=records.hash_files(folder),
    )
    records.write_json(folder / "result.json", result.model_dump(mode="json"))
    return {"name": name, "stage": stage, "run_id": run_id, "parents": []}


def evil(home: Path) -> None:
    """A local run whose reply, name and command would act in a page that did not take them for text."""
    notebook = executed(home, "evil")
    notebook.cells[-1].outputs = [new_output("stream", name="stdout", text=f"{EVIL}\n")]
    table = pd.DataFrame({"reply": [EVIL]})
    notebook.cells[-1].outputs.append(
        new_output("execute_result", {"text/html": table._repr_html_(), "text/plain": str(table)}, execution_count=3)
    )
    made = run(home, "evil", "eval", "s", "rtn", 4, 0.5, study="local", notebook=notebook)
    path = home / "runs" / "local" / "eval" / made["run_id"] / "result.json"
    content = json.loads(path.read_text())
    content["command"] = f"lowbit run eval -p x='{EVIL}'"
    content["model"] |= {"name": EVIL, "recipe": EVIL}
    records.write_json(path, content)


def _model(size: str, method: str, bits: int) -> dict:
    recipe = {"base": "base", "grpo": "base > grpo"}.get(method, f"base > grpo > {method}")
    scheme = {"scheme": f"w{bits}g64", "group_size": 64} if bits < 16 else {"scheme": "bf16", "group_size": None}
    return {
        "name": size,
        "recipe": recipe,
        "parameters": SIZES[size],
        "method": method,
        "bits": bits,
    } | scheme


def executed(home: Path, title: str) -> nbformat.NotebookNode:
    """An executed notebook with all that publishing must clean."""
    cells = [
        new_markdown_cell(f"# {title}\n\nA formula $W' = s (q - z)$ and a paper {{cite}}`frantar2022gptq`."),
        new_code_cell("parent: str = 'base-s'  # the model", metadata={"tags": ["parameters"]}, execution_count=1),
        new_code_cell(
            f"# Parameters\nparent = '{home}/runs/x'", metadata={"tags": ["injected-parameters"]}, execution_count=2
        ),
        new_markdown_cell("## A picture\n\n$$ W' = s \\, (q - z) $$"),
        new_code_cell(
            "# Reward against steps\nfigure",
            execution_count=3,
            metadata={"papermill": {"start_time": "2026-01-02T03:04:05"}, "execution": {"iopub.status.busy": "now"}},
            outputs=[
                new_output("stream", name="stdout", text=f"10 %\r50 %\r100 %\nsaved {home}/runs/x/model\n"),
                new_output(
                    "stream", name="stderr", text="TqdmWarning: IProgress not found. Please update ipywidgets.\n"
                ),
                new_output("display_data", data={"image/png": PIXEL, "text/plain": "<Figure>"}),
                new_output("display_data", data={"application/vnd.jupyter.widget-view+json": {}, "text/plain": "bar"}),
            ],
        ),
    ]
    return new_notebook(
        cells=cells, metadata={"papermill": {"input_path": f"{home}/notebooks/03_ptq.ipynb"}, "widgets": {}}
    )
