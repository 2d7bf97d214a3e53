"""Warm kernels: the kernels of a study are forked from one process that has imported their packages.

Importing torch, transformers and TRL takes about five seconds, more than most evaluations compute. So a study starts one
server, `python -P -m helpers.warm SOCKET`, that imports what notebooks use and waits. The process that Jupyter starts as
a kernel (`helpers.kernel`) asks it for a fork and stays, as the fork's stand-in:

    stand-in -> server   arguments, import path, environment, working folder, and its standard streams
    server -> stand-in   the fork's process id; later its exit code

The fork takes over all of what was sent and imports this project's modules itself, so a run's code is what its id says. It
ends with its stand-in, and with the server. Whatever goes wrong before the fork is there, the stand-in becomes the kernel.

A fork cannot use a GPU that its parent has used, so the server never does. bitsandbytes asks the GPU for its capability
when it is imported: a fork of the server asks in its place, and another tries whether it can compute. torchao, which
transformers imports where it is installed, starts the GPU: the server does without, and its forks import it themselves.
"""

import gc
import importlib
import json
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from helpers import kernel

# pyplot and the inline backend are not among them: they tie themselves to the IPython that is there when they are imported
PACKAGES = [
    *("torch", "numpy", "pandas", "scipy.stats", "matplotlib.figure", "matplotlib.backends.backend_agg", "papermill"),
    *("ipykernel.kernelapp", "IPython.core.pylabtools"),
    *("pydantic", "yaml", "typer", "nbformat", "math_verify", "tokenizers", "safetensors.torch"),
    *("transformers", "transformers.generation", "transformers.models.qwen3.modeling_qwen3"),
]
WITH_BITSANDBYTES = ["bitsandbytes", "peft", "datasets", "transformers.trainer", "trl.trainer.grpo_trainer"]


@contextmanager
def server(env: dict[str, str], log: TextIO, link: Path) -> Iterator[dict[str, str]]:
    """Run a server; gives `env`, the environment of the kernels, with the server's address. While it runs, `link` leads to the
    folder of its socket, so that whoever comes after a killed process can remove it.
    """
    folder = kernel.socket_folder()
    link.symlink_to(folder)
    address = str(folder / "warm")
    command = [sys.executable, "-P", "-m", "helpers.warm", address]
    process = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        preexec_fn=kernel.die_with_parent,
    )  # fmt: skip
    try:
        yield {**env, kernel.WARM: address}
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)
        link.unlink(missing_ok=True)


def serve(address: str) -> tuple[dict[str, Any], list[int]]:
    """Import the packages, then fork for ever; returns in the forks, with what the stand-in sent and its streams."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(128)  # who comes during the import waits for it: that is no slower than to import itself
    preload()
    kernels: dict[int, socket.socket | None] = {}  # process id: its stand-in, while that lives
    while True:
        waiting = [client for client in kernels.values() if client]
        for ready in select.select([listener, *waiting], [], [], 0.2 if kernels else None)[0]:
            if ready is not listener:  # a stand-in sends nothing more: it has ended
                pid = next(pid for pid, client in kernels.items() if client is ready)
                _kill(pid)
                ready.close()
                kernels[pid] = None
                continue
            client, _ = listener.accept()
            message, streams, _, _ = socket.recv_fds(client, kernel.MESSAGE_BYTES, 3)
            if not message:
                client.close()
                continue
            if (pid := os.fork()) == 0:
                for copy in (listener, client, *waiting):
                    copy.close()
                return json.loads(message), streams
            for stream in streams:
                os.close(stream)
            kernels[pid] = client
            with suppress(OSError):
                client.send(str(pid).encode())
        for pid, client in list(kernels.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del kernels[pid]
                if client:
                    with suppress(OSError):
                        client.send(str(os.waitstatus_to_exitcode(status)).encode())
                    client.close()


def become(sent: dict[str, Any], streams: list[int], parent: int) -> None:
    """Make this fork the process that its stand-in is."""
    os.setsid()
    kernel.die_with_parent(parent=parent)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(sent["environ"])
    os.chdir(sent["cwd"])
    sys.argv[:], sys.path[:] = sent["argv"], sent["path"]
    for name in [name for name in sys.modules if name.partition(".")[0] == "helpers"]:
        del sys.modules[name]
    importlib.invalidate_caches()
    tempfile.tempdir = None
    random.seed()
    sys.modules["numpy"].random.seed()


def preload() -> None:
    """Import what kernels need; ends the process if its forks could not use the GPU."""
    os.environ["JPY_PARENT_PID"] = str(os.getpid())  # ipykernel reads it when imported, and watches that process
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")  # as ipykernel sets it
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # is_available() must not start CUDA
    warnings.filterwarnings("ignore", "This process .* is multi-threaded")  # a fork is safe beside Arrow's one thread
    sys.modules["torchao"] = None  # "not installed", for transformers
    _load(PACKAGES)
    del sys.modules["torchao"]
    import torch

    if not torch.cuda.is_available():
        _load(WITH_BITSANDBYTES)
    else:
        ask, capability = torch.cuda.get_device_capability, _in_fork(_capability)
        torch.cuda.get_device_capability = lambda *_: divmod(capability, 10)
        if capability and _in_fork(lambda: (_load(WITH_BITSANDBYTES), _in_fork(_capability))[1]) == capability:
            _load(WITH_BITSANDBYTES)
        torch.cuda.get_device_capability = ask
        if not capability or _in_fork(_capability) != capability:
            sys.exit("Warm kernels could not use this GPU, so every run starts its own.")
    gc.collect()
    gc.freeze()  # else a fork's first collection writes to, and so copies, every page


def _load(names: list[str]) -> None:
    for name in names:
        with suppress(ImportError):  # what is missing is missed by the run that needs it
            importlib.import_module(name)


def _capability() -> int:
    """9.0 -> 90, after the GPU has computed something."""
    import torch

    torch.ones(2, device="cuda").sum().item()
    properties = torch.cuda.get_device_properties(0)
    return properties.major * 10 + properties.minor


def _in_fork(work: Callable[[], int]) -> int:
    """What `work` gives in a fork of this process, 1..255; 0 if it fails there."""
    if (pid := os.fork()) == 0:
        result = 0
        try:
            result = work()
        finally:
            os._exit(result)
    return max(0, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _kill(pid: int) -> None:
    """End a fork and the processes of its session."""
    for kill in (os.killpg, os.kill):  # the group is there once `become` has made it
        with suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    parent = os.getpid()
    sent, streams = serve(sys.argv[1])
    become(sent, streams, parent)
    from ipykernel.kernelapp import launch_new_instance

    launch_new_instance()
