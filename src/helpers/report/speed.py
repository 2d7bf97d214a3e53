"""What the speed chapter says: the rows of speed.json, their tables, and the numbers that its prose quotes.

A published run of the stage `speed` holds its measurements, one a metric, the whole row in the detail (`bench.measure` says what a
row is). speed.json is all of them: rows of GPUs first, and of two with the same work, shape, unit and device the later one.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from helpers.records import Result, write_json
from helpers.report.pages import NOT_MEASURED, table

STAGE = "speed"
UNKNOWN = "*not measured yet*"
ERRORS = {
    "rollout": "nats",
    "decoding": "of the tokens",
}  # what errors are that are not relative, by the start of a work
SEQUENCES = r"(\d+) sequence"
Row = dict[str, Any]
Quote = tuple[str, str, Callable[[Row], str]]


def merged(results: Sequence[Result]) -> list[Row]:
    """The rows of all speed runs."""
    found = {}
    for result in sorted((r for r in results if r.stage == STAGE), key=lambda r: r.started):
        for row in (metric.detail for metric in result.metrics):
            found[tuple(row[name] for name in ("device", "work", "shape", "unit"))] = row
    return sorted(found.values(), key=lambda row: row["device"] == "cpu")  # stable: else as they were measured


def write(results: Sequence[Result], folder: Path) -> list[Row]:
    """Write speed.json where there are speed runs; gives its rows."""
    if rows := merged(results):
        write_json(folder / "speed.json", rows)
    return rows


def read(path: Path) -> list[Row]:
    return json.loads(path.read_text()) if path.is_file() else []


# --- what a row is about ----------------------------------------------------------------------------------------------


def bits_of(row: Row) -> int:
    """The width of the weights: of `w4g128` 4, of everything else 16. A fake-quantized weight is computed with in full."""
    match = re.search(r"\bw(\d)", row["shape"])
    return int(match[1]) if match and "fake" not in row["work"] else 16


def count_of(row: Row, pattern: str) -> int | None:
    """The whole number in a shape, such as that of `SEQUENCES`."""
    match = re.search(pattern, row["shape"])
    return int(match[1].replace(",", "")) if match else None


def reached_share(row: Row) -> float | None:
    """The share of the limit that ours reaches."""
    if row.get("limit") is None:
        return None
    return row["limit"] / row["ours"] if row["better"] == "lower" else row["ours"] / row["limit"]


# --- tables -----------------------------------------------------------------------------------------------------------


def measurements(rows: Sequence[Row], start: str = "") -> str:
    """One line a row whose work begins with `start`: ours beside the others, the limit and the target."""
    lines = [
        [
            row["work"],
            row["shape"],
            f"**{with_unit(row, row['ours'])}**{_spread(row)}",
            ", ".join(_others(row)) or "–",
            "–" if row.get("ratio") is None else f"{row['ratio']:.2f}",
            "–" if row.get("limit") is None else f"{number(row['limit'])} ({100 * reached_share(row):.2g} %)",
            _target(row),
            "–" if row.get("error") is None else f"{row['error']:.1g} {error_unit(row)}".rstrip(),
            row["device"],
        ]
        for row in rows
        if row["work"].lower().startswith(start.lower())
    ]
    header = ["work", "shape", "ours [quartiles]", "others", "times better", "limit (reached)", "target", "error"]
    return table([*header, "device"], lines, tall=len(lines) > 20) if lines else NOT_MEASURED


def _others(row: Row) -> Iterator[str]:
    yield from (f"{name}: {number(value)}" for name, value in row["peers"].items())
    yield from (f"{name}: does not run" for name in row.get("left_out", ()))


def error_unit(row: Row) -> str:
    """The unit of a row's error, empty where it is relative; rows measured before they had one have that of their work."""
    of_work = next((unit for work, unit in ERRORS.items() if row["work"].startswith(work)), "")
    return row.get("error_unit", of_work)


def missed(rows: Sequence[Row]) -> str:
    """One line a row that does not reach its target, the furthest first."""
    late = [row for row in rows if row.get("reached") is False]
    if not late:
        return "Every target of the table is reached.\n" if rows else NOT_MEASURED
    lines = [
        [row["work"], with_unit(row, row["ours"]), number(row["target"]), f"{short_of(row):.2f}",
         "–" if row.get("limit") is None else f"{100 * reached_share(row):.2g} %", row["shape"], row["device"]]
        for row in sorted(late, key=short_of, reverse=True)
    ]  # fmt: skip
    return table(["work", "ours", "target", "times short", "of the limit", "shape", "device"], lines)


def short_of(row: Row) -> float:
    """How many times ours would have to get better to reach the target."""
    return row["ours"] / row["target"] if row["better"] == "lower" else row["target"] / row["ours"]


def devices(rows: Sequence[Row]) -> str:
    """One line a device: versions and commits of its rows."""
    lines = []
    for device in dict.fromkeys(row["device"] for row in rows):
        own = [row for row in rows if row["device"] == device]
        versions = {f"{name} {version}": None for row in own for name, version in row["versions"].items()}
        commits = dict.fromkeys(f"`{row['commit'][:10]}`" for row in own)
        lines.append([device, len(own), ", ".join(versions), ", ".join(commits)])
    return table(["device", "rows", "versions", "commit"], lines) if lines else NOT_MEASURED


def tests(path: Path) -> str:
    """One line a file of kernel tests: how many passed, on which device."""
    if not path.is_file():
        return "Not run on a GPU yet.\n"
    found = json.loads(path.read_text())
    outcomes = ("passed", "failed", "error", "skipped")
    lines = [
        [f"`{file}`", *(counts.get(outcome, 0) for outcome in outcomes)] for file, counts in found["files"].items()
    ]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return (
        table(["tests", *outcomes], lines)
        + f"\nOn {found['device']}, with {versions}, commit `{found['commit'][:10]}`.\n"
    )


def number(value: float) -> str:
    """20,613; 16.4; 0.00213"""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _spread(row: Row) -> str:
    low, high = row.get("spread", {}).get("ours") or (row["ours"],) * 2
    return f" [{number(low)}, {number(high)}]" if low < high else ""


def _target(row: Row) -> str:
    if row.get("target") is None:
        return "–"
    return f"{number(row['target'])}, {'reached' if row['reached'] else '**missed**'}"


# --- numbers of the prose ---------------------------------------------------------------------------------------------


def with_unit(row: Row, value: float) -> str:
    return f"{number(value)} {row['unit'].replace('us', 'µs').removesuffix(' beyond inputs')}"


def bandwidth(row: Row) -> float:
    """Bytes a second, as the limit of a row in microseconds was computed from."""
    return row["moved"]["ours"] / row["limit"] * 1e6


def least(row: Row, name: str) -> float:
    """Microseconds in which the bytes of a contender could be moved."""
    return row["moved"][name] / bandwidth(row) * 1e6


def peer(row: Row, name: str) -> float:
    """The value of the peer of this name, or of the first whose name holds it."""
    found = [value for key, value in row["peers"].items() if name in key]
    return row["peers"].get(name, found[0] if found else None)


def ours(row: Row) -> str:
    return with_unit(row, row["ours"])


def theirs(name: str) -> Callable[[Row], str]:
    return lambda row: with_unit(row, peer(row, name))


LAYER = "24,576 x 4,096, w4g128, "
PLAIN = "all logits at once"
QUOTED: dict[str, Quote] = {  # name -> a pattern of the work, one of shape and unit, and what is quoted of the row
    "speed_device": ("", "", lambda row: row["device"]),
    "speed_bandwidth": (".*linear", f"{LAYER}1 ", lambda row: f"{bandwidth(row) / 1e12:.2f} TB/s"),
    "speed_limit_bf16": (".*linear", f"{LAYER}1 ", lambda row: with_unit(row, least(row, "bf16"))),
    "speed_limit_w4": (".*linear", f"{LAYER}1 ", lambda row: with_unit(row, row["limit"])),
    **{f"speed_linear_{m}": (".*linear", f"{LAYER}{m} ", ours) for m in (1, 16, 128)},
    **{f"speed_bf16_{m}": (".*linear", f"{LAYER}{m} ", theirs("bf16")) for m in (1, 16, 128)},
    "speed_rollout": ("rollout$", "0.6B", ours),
    "speed_generate": ("rollout$", "0.6B", theirs("transformers generate")),
    "speed_fake": ("rollout, fake", "0.6B", lambda row: f"{100 * row['ratio']:.0f} %"),
    **{
        f"speed_packed_{n}": ("rollout, packed", f"w4g128, {n} sequences", lambda row: f"{row['ratio']:.1f}")
        for n in (16, 64)
    },
    "speed_grpo": ("GRPO step$", "0.6B", lambda row: f"{row['ratio']:.1f}"),
    "speed_qat": ("QAT step", "fixed grids", lambda row: f"{row['ours'] / peer(row, 'bf16'):.2f}"),
    "speed_gptq": ("GPTQ$", "28 layers", ours),
    "speed_gptqmodel": ("GPTQ$", "28 layers", theirs("gptqmodel")),
    "speed_kd": ("KD loss", ", ms$", ours),
    "speed_kd_memory": ("KD loss", ", GiB", ours),
    "speed_plain_kd": ("KD loss", ", ms$", theirs(PLAIN)),
    "speed_plain_kd_memory": ("KD loss", ", GiB", theirs(PLAIN)),
}


def numbers(rows: Sequence[Row]) -> dict[str, str]:
    """Every number that the chapter quotes, of the first device among the rows: a GPU where there is one."""
    rows = [row for row in rows if row["device"] == rows[0]["device"]]
    return {name: _quoted(rows, *how) for name, how in QUOTED.items()}


def _quoted(rows: Sequence[Row], work: str, shape: str, text: Callable[[Row], str]) -> str:
    for row in rows:
        if re.match(work, row["work"], re.IGNORECASE) and re.search(shape, f"{row['shape']}, {row['unit']}"):
            try:
                return text(row)
            except (KeyError, TypeError):  # a row of an older form, or without that peer
                continue
    return UNKNOWN
