"""The pool: nothing hangs, crashes, leaks or survives, from any thread."""

import os
import subprocess
import sys
import threading
import time

import psutil
import pytest

from helpers.grading import GradingError, pool
from helpers.grading.pool import Pool

GOOD = (r"\boxed{0.5}", r"\frac12", "maths")
FAKE = """
import os, sys, time
from helpers.grading import worker

def decided(answer, gold, how):
    if answer == "hang":
        while True: pass
    if answer == "sleep":
        time.sleep(1000)
    if answer == "memory":
        return bytearray(10**9) and ("equal", "never")
    if answer == "power":
        return str(len(str(7 ** 10**8)))
    if answer == "crash":
        os._exit(3)
    if answer == "raise":
        raise RuntimeError
    return "equal", "fake"

worker.decided = decided
worker.main()
"""


@pytest.fixture
def faulty(tmp_path, monkeypatch):
    """A pool whose workers do what the answer says."""
    (tmp_path / "faulty.py").write_text(FAKE)
    monkeypatch.setattr(pool, "WORKER", [str(tmp_path / "faulty.py")])
    monkeypatch.setattr(pool, "PATIENCE", 3)
    with Pool(2, seconds=1) as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_is_left():
    """No process of a pool outlives it."""
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    yield
    assert not [p for p in psutil.Process().children(recursive=True) if p.pid not in before]


@pytest.mark.slow
def test_each_fault_costs_its_own_job(faulty):
    answers = ["a", "hang", "b", "memory", "c", "crash", "raise", "power", "sleep", "d"]
    began = time.monotonic()
    verdicts = faulty.map([(rf"\boxed{{{answer}}}", "1", "maths") for answer in answers])
    assert time.monotonic() - began < 20
    assert [v[0] for v in verdicts] == [
        "equal",
        "timeout",
        "equal",
        "timeout",
        "equal",
        "timeout",
        "unparsed",
        "timeout",
        "timeout",
        "equal",
    ]
    rules = dict(zip(answers, (v[1] for v in verdicts), strict=True))
    assert rules["hang"] == rules["power"] == rules["sleep"] == "time"
    assert (rules["memory"], rules["crash"], rules["raise"]) == ("memory", "crash", "RuntimeError")
    assert verdicts[1][2:] == ("hang", "box")  # what was found is known, so the box still counts


def test_a_worker_that_cannot_start_is_no_verdict(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("raise SystemExit(1)")
    monkeypatch.setattr(pool, "WORKER", [str(tmp_path / "broken.py")])
    with Pool(1) as workers, pytest.raises(GradingError, match="cannot start"):
        workers.map([GOOD])


def test_order_threads_and_recycling(monkeypatch):
    monkeypatch.setattr(pool, "RECYCLE", 3)
    jobs = [(rf"\boxed{{{i}}}", str(i if i % 2 else i + 1), "maths") for i in range(11)]
    found = {}
    with Pool(2) as workers:
        threads = [threading.Thread(target=lambda n=n: found.update({n: workers.map(jobs)})) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        first = {w.process.pid for w in workers.workers}
        assert workers.map([]) == []
        assert workers.map(jobs[::-1]) == found[0][::-1] == found[1][::-1]  # whatever came before
        assert first != {w.process.pid for w in workers.workers}
    assert [v[0] for v in found[0]] == ["equal" if i % 2 else "different" for i in range(11)]


def test_real_bombs_end_in_time():
    bombs = [
        "9^{9^{9^{9}}}",
        r"\sum_{k=1}^{10^9} \frac{1}{k}",
        "(" * 5000 + "1" + ")" * 5000,
        "1+" * 8000 + "1",
        r"\frac{" * 900,
        "9" * 19_000,
    ]
    began = time.monotonic()
    with Pool(2) as workers:
        verdicts = workers.map([(bomb, "7", "answer") for bomb in bombs])
        used = sum(psutil.Process(w.process.pid).memory_info().rss for w in workers.workers if w.process.poll() is None)
    assert time.monotonic() - began < 30
    assert all(v[0] != "equal" for v in verdicts)
    assert used < 10**9


@pytest.mark.slow
@pytest.mark.parametrize("end", ["kill", "exit", "interrupt"])
def test_no_worker_survives_its_parent(end, tmp_path):
    lines = {"kill": "os.kill(os.getpid(), 9)", "exit": "sys.exit(0)", "interrupt": "raise KeyboardInterrupt"}[end]
    code = (
        "import os, sys\nfrom helpers.grading import pool\n"
        "workers = pool.shared()\nworkers.map([('1/2', '0.5', 'answer')])\n"
        f"print(*[w.process.pid for w in workers.workers], flush=True)\n{lines}\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False)
    pids = [int(word) for word in done.stdout.split()]
    assert pids
    deadline = time.monotonic() + 5
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(psutil.pid_exists, pids))
