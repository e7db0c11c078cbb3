"""A real Slurm on this machine, for tests: two nodes that are both this machine, under the current user.

``running_slurm()`` starts munged, slurmctld and a slurmd per node in a temporary folder on free ports and gives a
``Slurm``, through which jobs are submitted and waited for; it ends all of it, jobs included, whatever happened. Debian
builds slurmd so that several may share a machine (``MULTIPLE_SLURMD``), which is what makes two nodes possible without
network namespaces. The nodes claim more cores, memory and GPUs than there are: Slurm only counts them here.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

NODES = ("node1", "node2")
ADMIN_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")
GPUS = 4
STARTS_WITHIN_S = 60.0
REQUEUE_S = 5
"""Between a requeue and the next start Slurm waits until a job's credential has expired; two minutes by default."""


def missing_programs() -> list[str]:
    """What has to be installed before ``running_slurm`` can start anything; empty when all is there."""
    return [name for name in PROGRAMS if shutil.which(name, path=ADMIN_PATH) is None]


@dataclass(frozen=True)
class Slurm:
    """A Slurm that is up.

    Attributes:
        folder: its own; configuration and logs.
    """

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """For its clients: that of this process, without what another job may have left in it."""
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH", "SRUN"))}
        return {**inherited, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(
        self,
        *command: str | Path,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        """What a client such as srun or scontrol prints; ``environment`` is added to that of this process."""
        return subprocess.run(
            [str(part) for part in command],
            cwd=cwd,
            env={**self.environment, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def submit(
        self,
        *arguments: str | Path,
        cwd: Path,
        environment: Mapping[str, str] | None = None,
    ) -> str:
        """The id of a batch job: ``sbatch`` with ``arguments``."""
        done = self.run("sbatch", "--parsable", *arguments, cwd=cwd, environment=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, job: str) -> dict[str, str]:
        """What scontrol says of a job or of one task of an array (``12_1``)."""
        done = self.run("scontrol", "show", "job", "--oneliner", job)
        assert done.returncode == 0, done.stderr
        return dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)

    def wait(self, job: str, timeout_s: float) -> str:
        """The state in which ``job`` ended, such as COMPLETED.

        Raises:
            AssertionError: it did not end in time; holds what Slurm says of it.
        """
        end = time.monotonic() + timeout_s
        while (state := self.job(job)["JobState"]) not in ENDED:
            if time.monotonic() > end:
                raise AssertionError(f"job {job} is {state} after {timeout_s:g} s: {self.job(job)}\n{self.logs()}")
            time.sleep(0.1)
        return state

    def logs(self, lines: int = 15) -> str:
        """The last lines of every daemon."""
        texts = []
        for path in sorted(self.folder.glob("*.log")):
            texts += [f"--- {path.name}", *path.read_text(errors="replace").splitlines()[-lines:]]
        return "\n".join(texts)


@contextlib.contextmanager
def running_slurm() -> Iterator[Slurm]:
    """A Slurm of two nodes that are ready for jobs.

    Raises:
        AssertionError: a daemon ended, or the nodes were not ready in time; holds their logs.
    """
    # Not pytest's own folder: the path of munge's socket may have 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    slurm = Slurm(folder)
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        _configure(folder)
        munge = folder / "munge"
        # --force: as root it otherwise refuses sockets and keys in folders that others may enter.
        options = [f"--{name}={munge / name}" for name in ("socket", "pid-file", "log-file", "seed-file", "key-file")]
        daemons.append(_start(slurm, "munged", "--foreground", "--force", "--num-threads=2", *options))
        _await(slurm, daemons, (munge / "socket").exists)
        daemons.append(_start(slurm, "slurmctld", "-D"))
        daemons += [_start(slurm, "slurmd", "-D", "-N", node) for node in NODES]
        _await(slurm, daemons, lambda: _idle_nodes(slurm) == set(NODES))
        yield slurm
    finally:
        _end(slurm, daemons)
        shutil.rmtree(folder, ignore_errors=True)


def _configure(folder: Path) -> None:
    folder.chmod(0o755)
    for name in ("munge", "state"):
        (folder / name).mkdir(mode=0o755)
    key = folder / "munge" / "key-file"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    host, user = socket.gethostname().partition(".")[0], getpass.getuser()
    controller, *ports = _free_ports(1 + len(NODES))
    lines = [
        "ClusterName=tests",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={controller}",
        f"SlurmUser={user}",
        f"SlurmdUser={user}",
        "AuthType=auth/munge",
        f"AuthInfo=socket={folder / 'munge' / 'socket'},cred_expire={REQUEUE_S}",
        f"StateSaveLocation={folder / 'state'}",
        f"SlurmdSpoolDir={folder / 'spool.%n'}",
        f"SlurmctldPidFile={folder / 'slurmctld.pid'}",
        f"SlurmdPidFile={folder / 'slurmd.%n.pid'}",
        f"SlurmctldLogFile={folder / 'slurmctld.log'}",
        f"SlurmdLogFile={folder / 'slurmd.%n.log'}",
        "ProctrackType=proctrack/pgid",
        "TaskPlugin=task/none",
        "JobAcctGatherType=jobacct_gather/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU",
        "MpiDefault=none",
        "ReturnToService=2",
        "KillWait=2",
        "SlurmdParameters=config_overrides",
        "SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1",
        "GresTypes=gpu",
    ]
    lines += [
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=64 RealMemory=512000 Gres=gpu:{GPUS}"
        for node, port in zip(NODES, ports, strict=True)
    ]
    lines.append("PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO")
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
    for number in range(GPUS):  # Slurm wants to see a device file of each, and looks no closer
        (folder / f"gpu{number}").touch()
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{GPUS - 1}]\n")


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _start(slurm: Slurm, *command: str) -> subprocess.Popen[bytes]:
    # A test run that is killed takes its daemons with it.
    tied = ["setpriv", "--pdeathsig", "TERM", "--"] if shutil.which("setpriv") else []
    with (slurm.folder / f"{command[0]}.output.log").open("ab") as output:
        return subprocess.Popen(
            [*tied, *command],
            env={**slurm.environment, "PATH": ADMIN_PATH},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _await(slurm: Slurm, daemons: Sequence[subprocess.Popen[bytes]], ready: Callable[[], bool]) -> None:
    end = time.monotonic() + STARTS_WITHIN_S
    while not ready():
        ended = [daemon.args for daemon in daemons if daemon.poll() is not None]
        if ended or time.monotonic() > end:
            raise AssertionError(f"Slurm did not start; ended: {ended}\n{slurm.logs()}")
        time.sleep(0.1)


def _idle_nodes(slurm: Slurm) -> set[str]:
    done = slurm.run("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N")
    return set(done.stdout.split()) if done.returncode == 0 else set()


def _end(slurm: Slurm, daemons: Sequence[subprocess.Popen[bytes]]) -> None:
    """First the jobs and then the daemons, as they would have it; then whatever still belongs to this Slurm."""
    with contextlib.suppress(subprocess.TimeoutExpired, OSError):
        slurm.run("scancel", "--user", getpass.getuser(), timeout_s=10)
        end = time.monotonic() + 10
        while slurm.run("squeue", "--noheader", timeout_s=10).stdout and time.monotonic() < end:
            time.sleep(0.1)
    for daemon in reversed(daemons):
        daemon.terminate()
    for daemon in reversed(daemons):
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.wait(5)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if _belongs(process, slurm.folder):
                process.kill()
    for daemon in daemons:
        daemon.wait()


def _belongs(process: psutil.Process, folder: Path) -> bool:
    """Started with its configuration; or, as a slurmstepd writes its title over its environment, with its log open."""
    if process.name() == "slurmstepd":
        return any(Path(file.path).is_relative_to(folder) for file in process.open_files())
    return process.environ().get("SLURM_CONF") == str(folder / "slurm.conf")


def rank_of(out: Path, rank: int) -> psutil.Process:
    """Return the process of a job's ``rank``, of the run in ``out``.

    Raises:
        LookupError: there is none.
    """
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            is_rank = "app.train" in words and str(out) in words and "srun" not in words[0]
            if is_rank and process.environ().get("SLURM_PROCID") == str(rank):
                return process
    raise LookupError(f"no process of rank {rank} of {out} was found")
