"""Our quantizers against the packages that people use: one model, the same calibration tokens, the same scheme.

`.venv-crosscheck/bin/python tests/crosscheck/compare.py` makes `book/results/crosscheck.csv`. Words after it keep only the rows of
which method, scheme or peer is one of them, and print these without writing; a peer that has answered the same request before is
then not run again. Model: the shipped `base-s`. Calibration: 128 replies that it sampled itself, with their prompts. Held out: 256
others, to problems of another split. Both sides quantize in a process of their own (`peers.py`), on one thread, and leave float32
weights, which the same code then measures:

    layer error   mean over blocks of |block'(x) - block(x)| / |block(x) - x| on held-out text, x = what the full-precision model
                  feeds the block: it does not matter how a method rescales weights and norms against each other
    perplexity    of the held-out replies, given their prompts (the model was never trained on prompts)
    seconds       of the quantization alone; ours includes measuring each layer's error for its report
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from measures import Text, equal_codes, layer_error, losses, traces
from transformers import AutoModelForCausalLM, PreTrainedModel

from helpers import models

ROOT = Path(__file__).parents[2]
WORK = ROOT / "_build" / "crosscheck"
OUT = ROOT / "book" / "results" / "crosscheck.csv"
GROUP = 64
LIMIT = 0.01  # an error further from the peer's than this share is put into words


@dataclass(frozen=True)
class Pair:
    """One row: our method at a scheme, and the peer with its settings; `same` says whether equal codes are to be expected."""

    method: str
    scheme: str
    ours: dict[str, Any]
    peer: str
    settings: dict[str, Any] = field(default_factory=dict)
    same: bool = False
    why: str = ""

    @property
    def bits(self) -> int:
        """Bits a weight."""
        return {"n": 4, "i": 8}.get(self.scheme[0]) or int(self.scheme[1])


def pairs() -> list[Pair]:
    """Every comparison, method by method; a clip search is compared with a clip search."""
    rows = []
    schemes = [f"w{bits}g{GROUP}" for bits in (8, 4, 3, 2)]
    for scheme in schemes:
        for peer in ("torchao", "llm-compressor RTN"):
            rows.append(Pair("rtn", scheme, {"method": "rtn"}, peer, same=True, why="ours rounds scales to float16"))
    for name, clip, compressor, model in (
        ("gptq", False, {}, {}),
        ("gptq-clip", True, {"observer": "memoryless_mse"}, {"mse": 2.0}),
    ):
        searched = "; ours tries ranges inside GPTQ, the peer before it" if clip else ""
        for scheme in schemes:
            ours = {"method": "gptq", "clip": clip}
            why = "ours calibrates o_proj and down_proj on what the layers quantized before them make"
            rows.append(Pair(name, scheme, ours, "llm-compressor GPTQ", compressor, not clip, why + searched))
            why = "its groups get their grid when their first column is reached, ours beforehand"
            rows.append(Pair(name, scheme, ours, "gptqmodel", model, why=why + searched))
            rows.append(
                Pair(
                    name, scheme, ours, "gptqmodel", model | {"static_groups": True}, not clip, "static groups in both"
                )
            )
    for scheme in schemes[1:]:
        rows.append(Pair("awq", scheme, {"method": "awq"}, "AutoAWQ", why="ours also scales between v_proj and o_proj"))
        rows.append(
            Pair(
                "awq",
                scheme,
                {"method": "awq"},
                "llm-compressor AWQ",
                why="ours searches each range by its part of the output",
            )
        )
    for scheme, settings in (("nf4", {"double_quant": False}), ("nf4-dq", {"double_quant": True}), ("int8", {})):
        rows.append(Pair("bnb", scheme, {"method": "bnb"}, "bitsandbytes", settings, True, "ours is that package"))
    return rows


class Bench:
    """The full-precision model, the texts, and what has been measured of each quantized model."""

    def __init__(self, fresh: bool) -> None:
        """With `fresh` every peer runs; without, what it answered to the same request before is taken again."""
        self.fresh = fresh
        WORK.mkdir(parents=True, exist_ok=True)
        self.full, tokenizer = models.load("base-s", device=torch.device("cpu"))
        self.model = WORK / "full"
        self.full.save_pretrained(self.model)
        tokenizer.save_pretrained(self.model)
        self.calibration = [text.ids for text in traces(self.full, tokenizer, "calibration", 128)]
        self.held_out: list[Text] = traces(self.full, tokenizer, "test", 256)
        self.done: dict[str, dict[str, Any]] = {}

    def run(self, peer: str, bits: int, settings: dict[str, Any]) -> dict[str, Any]:
        """The peer's answer with `error`, `losses`, `perplexity` and the `model`; equal requests are run once.

        Errors: see `quantize`.
        """
        key = "-".join([peer, str(bits), *(f"{k}={v}" for k, v in settings.items())]).replace(" ", "-")
        if key in self.done:
            return self.done[key]
        out = WORK / key
        out.mkdir(exist_ok=True)
        request = out / "request.json"
        common = {"peer": peer, "model": str(self.model), "tokens": self.calibration, "out": str(out)}
        wanted = json.dumps(common | {"bits": bits, "group_size": GROUP, "settings": settings})
        answered = (out / "answer.json").is_file() and request.read_text() == wanted
        if self.fresh or peer == "ours" or not answered:
            (out / "answer.json").unlink(missing_ok=True)
            request.write_text(wanted)
            quantize(key, request, out)
        answer = json.loads((out / "answer.json").read_text())
        other = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
        sums, counts = losses(other, self.held_out)
        self.done[key] = answer | {
            "error": layer_error(self.full, other, self.held_out),
            "losses": sums,
            "perplexity": float((sums.sum() / counts.sum()).exp()),
            "model": other,
        }
        return self.done[key]


def quantize(key: str, request: Path, out: Path) -> None:
    """Run `request` in a process of its own, in the folder `out`, since some packages leave logs where they run.

    Errors: `RuntimeError` with the end of what it printed.
    """
    log = out / "log.txt"
    with log.open("w") as file:
        command = [sys.executable, str(Path(__file__).with_name("peers.py")), str(request)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        failed = subprocess.run(command, cwd=out, env=environment, stdout=file, stderr=file).returncode
    if failed:
        raise RuntimeError(f"{key} ended with {failed}:\n{log.read_text()[-2000:]}")


def row(bench: Bench, pair: Pair) -> dict[str, Any]:
    """The table's row of `pair`."""
    ours = bench.run("ours", pair.bits, {"scheme": pair.scheme} | pair.ours)
    peer = bench.run(pair.peer, pair.bits, pair.settings)
    return {
        "method": pair.method,
        "scheme": pair.scheme,
        "peer": pair.peer + (" (static groups)" if "static_groups" in pair.settings else ""),
        "peer_version": peer["version"],
        "layer_error_ours": ours["error"],
        "layer_error_peer": peer["error"],
        "perplexity_ours": ours["perplexity"],
        "perplexity_peer": peer["perplexity"],
        "seconds_ours": round(ours["seconds"], 3),
        "seconds_peer": round(peer["seconds"], 3),
        "note": note(bench.full, pair, ours, peer),
    }


def note(full: PreTrainedModel, pair: Pair, ours: dict[str, Any], peer: dict[str, Any]) -> str:
    """Where they differ and why, and whether the perplexities differ by more than two standard errors (paired over texts)."""
    parts = []
    change = ours["error"] / peer["error"] - 1
    if abs(change) > LIMIT:
        parts.append(f"error {abs(change):.1%} {'above' if change > 0 else 'below'} the peer's")
    if pair.same:
        group = GROUP if pair.scheme.startswith("w") else 64
        parts.append(f"{equal_codes(full, ours['model'], peer['model'], pair.bits, group):.2%} of the codes equal")
    difference = ours["losses"] - peer["losses"]
    noise = 2 * float(difference.std()) * len(difference) ** 0.5
    if noise and abs(float(difference.sum())) <= noise:
        parts.append("perplexities within noise")
    elif float(difference.sum()):
        parts.append(f"perplexity {'worse' if difference.sum() > 0 else 'better'} beyond noise")
    return "; ".join([*parts, pair.why])


def main(words: list[str]) -> None:
    """Make the table, or print the rows that `words` choose."""
    chosen = [p for p in pairs() if not words or {p.method, p.scheme, p.peer} & set(words)]
    bench = Bench(fresh=not words)
    sums, counts = losses(bench.full, bench.held_out)
    print(f"full precision: perplexity {float((sums.sum() / counts.sum()).exp()):.4f}", flush=True)
    rows = []
    for pair in chosen:
        rows.append(row(bench, pair))
        print(json.dumps(rows[-1]), flush=True)
    if not words:
        pd.DataFrame(rows).to_csv(OUT, index=False, float_format="%.6g")
        print(f"wrote {OUT}")


if __name__ == "__main__":
    main(sys.argv[1:])
