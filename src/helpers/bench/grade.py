"""`lowbit bench grade`: the grader on ordinary replies to the papers' benchmarks."""

from typing import Any

from helpers import tasks
from helpers.bench import measure
from helpers.grading import pool, rewrites

TARGET = 60.0  # seconds for 12,480 replies


def rows(replies: int = 8, workers: int = 2, repeats: int = 9) -> list[dict[str, Any]]:
    """Grading `replies` ordinary replies to each problem of the papers' benchmarks, workers started each time.

    A reply is a few paragraphs and a boxed answer, which is the gold in one of the ways of `grading.rewrites`, in turn.
    """
    jobs = []
    for problem in tasks.load(tasks.PAPERS, "test", 10**6):
        found = rewrites.replies(problem.gold)
        for i in range(replies):
            text = "Let us see what follows from $a_1 + b_1 = 12$.\n\n" * 40
            jobs.append(
                (rf"<think>{text}</think>{text}So it is \boxed{{{found[i % len(found)][2]}}}.", problem.gold, "maths")
            )

    def work() -> None:
        with pool.Pool(workers) as found:
            found.map(jobs)

    seconds = measure.timed({"ours": work}, repeats)
    return [measure.row("grading", f"{len(jobs):,} replies, {workers} workers", "s", seconds, "ours", target=TARGET)]
