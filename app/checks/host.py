"""Checks of the machine for what would stop or slow a training: packages, devices, memory, launchers, disk.

Takes the description that ``run_info`` gives and the run folder; returns findings. Nothing is left behind.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from app.launch.host import memory_bytes
from app.settings.console import Finding
from app.training.run_info import find_program, output_of, package_version
from parallel.units import bytes_text

WRITE_BYTES = 64_000_000
"""Written to the run folder for a look at its speed: about a checkpoint of ResNet-18."""

LEAST_FREE_BYTES = 5_000_000_000
"""Two checkpoints of a large model, with their optimiser states, and the one being written."""

LEAST_SHARED_BYTES = 1 << 30
"""Containers come with 64 MiB, in which NCCL finds no room for its buffers."""

LEAST_OPEN_FILES = 1024
"""An MRXS slide alone is up to a hundred files."""

MPI_ADVICE = "only mpirun needs it: pip install 'megatile[mpi]'"


def check_versions(environment: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield findings on MegaTile, Python, the packages and OpenSlide's library."""
    megatile = environment["megatile"]
    commit = f" commit {megatile['commit'][:10]}" if megatile["commit"] else ""
    changed = ", files changed since" if megatile["changed"] else ""
    yield Finding("ok", "megatile", f"{megatile['version'] or 'not installed: run from its folder'}{commit}{changed}")
    yield Finding("ok", "python", f"{environment['python']} on {environment['os']}")
    installed = ", ".join(f"{name} {version}" for name, version in environment["packages"].items() if version)
    missing = missing_packages()
    yield Finding("ok", "packages", installed)
    if missing:
        yield Finding("FAULT", "missing", f"{', '.join(missing)}: pip install {' '.join(missing)}")
    library = environment["openslide_library"]
    yield (
        Finding("ok", "openslide", f"library {library}")
        if library
        else Finding("FAULT", "openslide", "the library cannot be loaded: pip install openslide-bin")
    )


def missing_packages() -> list[str]:
    """Return required distributions that are not installed; none when MegaTile itself is not installed."""
    if package_version("megatile") is None:
        return []
    required = [text for text in importlib.metadata.requires("megatile") or [] if "extra ==" not in text]
    names = [re.split(r"[^A-Za-z0-9._-]", text, maxsplit=1)[0] for text in required]
    return [name for name in names if package_version(name) is None]


def check_devices(environment: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield findings on the CPU and on each GPU, which computes a convolution."""
    import torch

    cpu = environment["cpu"]
    yield Finding("ok", "cpu", f"{cpu['model']}, {cpu['cores']} of {cpu['cores_of_machine']} cores usable")
    for index, gpu in enumerate(environment["gpus"]):
        device = f"{gpu['name']}, {bytes_text(gpu['memory_bytes'])}, bf16 {'yes' if gpu['bf16'] else 'no'}"
        versions = f"driver {environment['driver'] or 'unknown'}, CUDA {environment['cuda']}"
        if gpu["missing_kernels"]:
            yield Finding("FAULT", f"gpu {index}", f"{device}, {versions}; {gpu['missing_kernels']}")
            continue
        try:
            ones = torch.ones(1, 1, 8, 8, device=f"cuda:{index}")
            torch.nn.functional.conv2d(ones, ones).sum().item()
        except RuntimeError as fault:
            yield Finding("FAULT", f"gpu {index}", f"{device}, {versions}; a convolution fails: {fault}")
        else:
            yield Finding("ok", f"gpu {index}", f"{device}, {versions}")
    if not environment["gpus"]:
        driver = environment["driver"]
        yield (
            Finding(
                "warning",
                "gpu",
                f"the driver ({driver}) is there but torch sees no GPU; torch is built for CUDA "
                f"{environment['cuda'] or 'none'}: install a torch that fits the driver, or update the driver",
            )
            if driver
            else Finding("note", "gpu", "none: training runs on the CPU")
        )


def check_memory() -> Iterator[Finding]:
    """Yield findings on memory, shared memory and the limit of open files."""
    total, free = memory_bytes()
    yield Finding("ok", "memory", f"{bytes_text(total)}, {bytes_text(free)} free")
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = os.statvfs(shared)
        shared_bytes, left = size.f_blocks * size.f_frsize, size.f_bavail * size.f_frsize
        amount = f"{bytes_text(shared_bytes)}, {bytes_text(left)} free"
        enough = left >= LEAST_SHARED_BYTES
        advice = "" if enough else "; several GPUs need more: docker run --shm-size=8g"
        yield Finding("ok" if enough else "warning", "shared memory", amount + advice)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    enough = unlimited or soft >= LEAST_OPEN_FILES
    limit = "no limit" if unlimited else f"{soft} at once"
    advice = "" if enough else f"; slides of many files need more: ulimit -n {min(4096, hard) if hard > 0 else 4096}"
    yield Finding("ok" if enough else "warning", "open files", limit + advice)


def check_launchers(environment: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield findings on torchrun, MPI and Slurm, and on what started this process."""
    launcher = environment["launcher"]
    yield Finding("ok" if launcher["found"]["torchrun"] else "note", "torchrun", _there("torchrun"))
    # Loading an MPI library can end the process, and hang where its launcher is half there.
    library = output_of([sys.executable, "-c", "from mpi4py import MPI; print(MPI.Get_library_version())"])
    if library:
        yield Finding("ok", "mpi4py", f"{package_version('mpi4py')} with {library.splitlines()[0]}")
    elif package_version("mpi4py"):
        yield Finding("warning", "mpi4py", "installed but no MPI library loads with it: pip install 'megatile[mpi]'")
    else:
        yield Finding("note", "mpi4py", f"absent; {MPI_ADVICE}")
    for program, absent in (("mpirun", f"absent; {MPI_ADVICE}"), ("srun", "absent; only Slurm clusters have it")):
        is_there = launcher["found"][program]
        yield Finding("ok" if is_there else "note", program, _there(program) if is_there else absent)
    variables = ", ".join(f"{name}={value}" for name, value in launcher["variables"].items())
    yield Finding("ok", "started by", f"{launcher['started_by']} ({variables})" if variables else "no launcher")


def _there(program: str) -> str:
    return find_program(program) or "absent; --ranks N starts the ranks without it"


def check_run_folder(out: Path) -> Iterator[Finding]:
    """Yield findings on room and speed of the disk where ``out`` is, or would be made."""
    folder = out.absolute()
    while not folder.exists():
        folder = folder.parent
    where = str(out) if folder == out.absolute() else f"{out} (to be made in {folder})"
    advice = "name another folder with --out"
    if not folder.is_dir():
        yield Finding("FAULT", "run folder", f"{where}: {folder} is a file; {advice}")
        return
    block = os.urandom(WRITE_BYTES // 64)  # random: a file system that compresses would seem fast
    try:
        free = shutil.disk_usage(folder).free
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".megatile-doctor-") as file:
            started_s = time.perf_counter()
            for _ in range(64):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            took_s = time.perf_counter() - started_s
    except OSError as fault:
        yield Finding("FAULT", "run folder", f"{where} cannot be written ({fault.strerror}); {advice}")
        return
    yield Finding("ok", "run folder", where)
    yield Finding("ok", "write speed", f"{WRITE_BYTES / took_s / 1e6:.0f} MB/s, 64 MB written and synchronised")
    enough = free >= LEAST_FREE_BYTES
    yield Finding(
        "ok" if enough else "warning",
        "free space",
        bytes_text(free) + ("" if enough else f"; checkpoints of a large model need {LEAST_FREE_BYTES / 1e9:.0f} GB"),
    )
