"""A Slurm of one node for tests: munged, slurmctld and slurmd as children of this process, with all their files in one folder.

Needs root, and the programs of Slurm and Munge (Debian: slurm-wlm, munge). No accounting, no cgroups; two made-up GPUs.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "sinfo", "scancel", "setpriv")
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/sock
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
MinJobAge=300
MailProg=/bin/true
GresTypes=gpu
SlurmdSpoolDir={folder}/spool
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 CPUs=4 RealMemory=16000 Gres=gpu:2
PartitionName=test Nodes=n1 Default=YES MaxTime=INFINITE State=UP
"""
GRES = "AutoDetect=off\nNodeName=n1 Name=gpu File=/dev/null\nNodeName=n1 Name=gpu File=/dev/zero\n"


def missing() -> str:
    """Why there can be no Slurm here; empty where there can."""
    if os.getuid() != 0:
        return "only root can start a Slurm"
    absent = [name for name in PROGRAMS if not shutil.which(name)]
    return f"not installed: {', '.join(absent)}" if absent else ""


@contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Run a Slurm in a folder of short path; gives the environment in which its commands find it."""
    for name in ("munge", "spool", "state"):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o755)  # munged wants everybody to reach its socket
    (folder / "munge" / "key").write_bytes(os.urandom(1024))
    (folder / "munge" / "key").chmod(0o600)
    (folder / "slurm.conf").write_text(
        CONF.format(folder=folder, host=socket.gethostname().split(".")[0], ports=_ports())
    )
    (folder / "gres.conf").write_text(GRES)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    env["SLURM_CONF"] = conf = str(folder / "slurm.conf")
    munge = [f"--{name}={folder}/munge/{end}" for name, end in _MUNGE.items()]
    commands = (["munged", "-F", *munge], ["slurmctld", "-D", "-f", conf], ["slurmd", "-D", "-N", "n1", "-f", conf])
    daemons: list[subprocess.Popen] = []
    try:
        with (folder / "log").open("w") as log:
            for command in commands:
                daemons.append(
                    subprocess.Popen(["setpriv", "--pdeathsig", "TERM", *command], env=env, stdout=log, stderr=log)
                )
                if command[0] == "munged":
                    _wait((folder / "munge" / "sock").exists)
        _wait(lambda: "idle" in subprocess.run(["sinfo", "-h"], env=env, capture_output=True, text=True).stdout)
        yield env
    finally:
        subprocess.run(["scancel", "--user=root"], env=env, capture_output=True, timeout=20, check=False)
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()


_MUNGE = {"key-file": "key", "socket": "sock", "pid-file": "pid", "seed-file": "seed"}


def _ports() -> list[int]:
    with socket.socket() as one, socket.socket() as other:
        for found in (one, other):
            found.bind(("127.0.0.1", 0))
        return [found.getsockname()[1] for found in (one, other)]


def _wait(ready, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            raise TimeoutError("Slurm did not start: see its logs")
        time.sleep(0.1)
