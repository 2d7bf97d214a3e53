"""The Jupyter kernel of a run: this interpreter, its own IPython folder, sockets instead of ports, and no life of its
own.

papermill would start whatever kernel the user registered as `python3`, talk to it over TCP ports that parallel runs
race for, and leave it behind if papermill is killed. `manager` gives a kernel manager class without these three faults.
The kernel asks Linux to be killed with its parent; elsewhere ipykernel's own check of its parent, once a second, does
that. In a study the process that starts here only stands in for a kernel that a server forks: see `warm`.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path

PR_SET_PDEATHSIG = 1
WARM = "LOWBIT_WARM"  # the environment variable that gives the address of a server of kernels
MESSAGE_BYTES = 2**20


def manager(folder: Path, env: dict[str, str]) -> type:
    """A kernel manager class; `folder` (a short path, for sockets) is the run's own, `env` adds to the environment."""
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager

    argv = [sys.executable, "-P", "-m", "helpers.kernel", "-f", "{connection_file}"]
    spec = KernelSpec(
        argv=argv, display_name="Python 3", language="python", env={"IPYTHONDIR": str(folder / "ipython"), **env}
    )

    class Manager(AsyncKernelManager):
        kernel_spec = spec

        def __init__(self, **kwargs):
            super().__init__(**kwargs, transport="ipc", connection_file=str(folder / "kernel.json"))

    return Manager


def die_with_parent(number: int = signal.SIGKILL, parent: int | None = None) -> None:
    """Have the system send this process a signal when its parent ends (Linux)."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid() if parent is None else parent
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), number)


def socket_folder() -> Path:
    """A new private folder; a Unix socket's path has at most 107 characters, so its own must be short."""
    short = "/tmp" if len(tempfile.gettempdir()) > 60 and Path("/tmp").is_dir() else None
    return Path(tempfile.mkdtemp(prefix="lowbit-", dir=short))


def stand_in(address: str) -> None:
    """Have a server fork the kernel, and end as it ends; returns only if there is no kernel from there."""
    sent = {"argv": sys.argv, "path": sys.path, "environ": dict(os.environ), "cwd": os.getcwd()}
    try:
        server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # not every system has these
        server.connect(address)
        socket.send_fds(server, [json.dumps(sent).encode()], [0, 1, 2])
        pid = int(server.recv(32) or 0)
    except OSError:
        return
    if pid:
        signal.signal(signal.SIGINT, lambda *_: os.kill(pid, signal.SIGINT))
        code = int(server.recv(32) or 1)
        sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    die_with_parent(parent=int(os.environ["JPY_PARENT_PID"]))
    if WARM in os.environ:
        stand_in(os.environ[WARM])
    from ipykernel.kernelapp import launch_new_instance

    launch_new_instance()
