"""A grading worker: one job a line on standard input, two lines an answer on standard output, all JSON.

The system enforces the limits, so no answer escapes them, not even inside a long computation in C: before each job
the soft limit of processor time (`RLIMIT_CPU`) is set to what was used so far plus the job's share, and going past it
ends the process; address space is limited once (`RLIMIT_AS`), and a job that asks for more gets a `MemoryError`.
Processor time, not the clock, so that a busy machine changes no verdict. A thread watches the input and the parent:
when either is gone, the worker ends.

Jobs are `[reply, gold, how]`; `how` is maths or number (a reply to extract from), answer (a bare string), response
(number if the gold is one), or math-verify (what math-verify alone says, for comparison). The answer's lines are
`[answer, how it was found]`, so that a reply whose grading is ended still has its box, and `[outcome, rule]`.
"""

import json
import os
import queue
import select
import sys
import threading
import time

from helpers.grading.equal import equal, is_number
from helpers.grading.find import find
from helpers.grading.operators import alone

STACK_BYTES = 64 * 2**20
RECURSION = 40_000


def extracted(reply: str, gold: str, how: str) -> tuple[str | None, str]:
    """(answer, how it was found) of one job."""
    if how in ("answer", "math-verify"):
        return reply, how
    found = find(reply, number=how == "number" or (how == "response" and is_number(gold)))
    return (found.answer, found.rule) if found else (None, "")


def decided(answer: str | None, gold: str, how: str) -> tuple[str, str]:
    """(outcome, rule) of one job."""
    if answer is None:
        return "unparsed", "no answer"
    if how == "math-verify":
        return ("equal" if alone(gold, answer) else "different"), how
    return equal(gold, answer)


def limit_processor(seconds: int) -> None:
    """End this process when it has used so many more seconds of processor time."""
    import resource

    soft = int(time.process_time()) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))


def limit_memory(megabytes: int) -> None:
    """Give this process so much address space, and no core file."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (megabytes * 2**20, megabytes * 2**20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def watch(jobs: "queue.Queue[str]") -> None:
    """Put each line of the input into `jobs`; end the process with its input or its parent."""
    parent, left = os.getppid(), b""
    while os.getppid() == parent:
        if select.select([0], [], [], 1.0)[0]:
            block = os.read(0, 2**16)
            if not block:
                break
            *lines, left = (left + block).split(b"\n")
            for line in lines:
                jobs.put(line.decode())
    os._exit(0)


def work(jobs: "queue.Queue[str]", seconds: int) -> None:
    """Answer jobs for ever; after a `MemoryError` the process is not fit to go on."""
    while True:
        reply, gold, how = json.loads(jobs.get())
        limit_processor(seconds)
        try:
            answer, found = extracted(reply, gold, how)
            say(answer, found)
            verdict = decided(answer, gold, how)
        except MemoryError:
            os._exit(MEMORY)
        except Exception as error:  # a fault of ours or of math-verify: an answer that cannot be read
            verdict = "unparsed", type(error).__name__
        say(*verdict)


def say(*values: str | None) -> None:
    line = memoryview(json.dumps(values).encode() + b"\n")
    while line:
        line = line[os.write(1, line) :]


MEMORY = 77  # the exit status of a worker that was refused memory


def main() -> None:
    seconds, megabytes = int(sys.argv[1]), int(sys.argv[2])
    limit_memory(megabytes)
    sys.setrecursionlimit(RECURSION)
    threading.stack_size(STACK_BYTES)
    jobs: queue.Queue[str] = queue.Queue()
    say("ready")
    threading.Thread(target=work, args=(jobs, seconds), daemon=True).start()
    watch(jobs)


if __name__ == "__main__":
    main()
