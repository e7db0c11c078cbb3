"""Check machine, run folder and slides before training: ``python -m app.doctor [--slides DIR]``.

Looks at versions, slide libraries, devices, memory, launchers and the run folder; with ``--slides`` at every slide.
Slide libraries are imported, the rest is really used. Exit code 1 when something that training needs is faulty.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from app.checks.slides import SlideCheck, check_libraries, check_slides
from app.launch.host import memory_bytes, usable_cores
from app.settings.cli import FAILED, OK, Finding, print_table, run_command
from app.settings.run import OpeningSettings, slides_in
from app.training.run_info import describe_environment, find_program, output_of, package_version
from parallel.units import bytes_text
from pipelines.catalog.table import counted

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
    yield Finding("ok", "packages", installed)
    if missing := missing_packages():
        yield Finding("FAULT", "missing", f"{', '.join(missing)}: pip install {' '.join(missing)}")
    if library := environment["openslide_library"]:
        yield Finding("ok", "openslide", f"library {library}")
    else:
        yield Finding("FAULT", "openslide", "the library cannot be loaded: pip install openslide-bin")


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
    if environment["gpus"]:
        return
    if driver := environment["driver"]:
        reason = f"the driver ({driver}) is there but torch sees no GPU; torch is built for CUDA"
        advice = "install a torch that fits the driver, or update the driver"
        yield Finding("warning", "gpu", f"{reason} {environment['cuda'] or 'none'}: {advice}")
    else:
        yield Finding("note", "gpu", "none: training runs on the CPU")


def check_memory() -> Iterator[Finding]:
    """Yield findings on memory, shared memory and the limit of open files."""
    total, free = memory_bytes()
    yield Finding("ok", "memory", f"{bytes_text(total)}, {bytes_text(free)} free")
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = os.statvfs(shared)
        shared_bytes, left = size.f_blocks * size.f_frsize, size.f_bavail * size.f_frsize
        amount = f"{bytes_text(shared_bytes)}, {bytes_text(left)} free"
        advice = "several GPUs need more: docker run --shm-size=8g"
        yield _enough(left >= LEAST_SHARED_BYTES, "shared memory", amount, advice)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    limit = "no limit" if unlimited else f"{soft} at once"
    advice = f"slides of many files need more: ulimit -n {min(4096, hard) if hard > 0 else 4096}"
    yield _enough(unlimited or soft >= LEAST_OPEN_FILES, "open files", limit, advice)


def _enough(enough: bool, name: str, amount: str, advice: str) -> Finding:
    return Finding("ok", name, amount) if enough else Finding("warning", name, f"{amount}; {advice}")


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
    advice = f"checkpoints of a large model need {LEAST_FREE_BYTES / 1e9:.0f} GB"
    yield _enough(free >= LEAST_FREE_BYTES, "free space", bytes_text(free), advice)


@dataclass(frozen=True)
class DoctorCommand:
    """Say whether this machine, the run folder and the slides are fit for training, and what is missing."""

    slides: Path | None = None
    """Folder of whole-slide images to open and read from, searched with its sub-folders."""
    out: Path = Path("runs/train")
    """Run folder whose disk is tried."""
    opening: OpeningSettings = field(default_factory=OpeningSettings)


def doctor(command: DoctorCommand) -> int:
    """Look at everything, print it, and count the faults."""
    specs = slides_in(command.slides, command.opening) if command.slides else ()
    with _busy("looking at the machine"):
        environment = describe_environment()
        groups = {
            "Versions": [*check_versions(environment), *check_libraries()],
            "Devices": list(check_devices(environment)),
            "Memory and limits": list(check_memory()),
            "Launchers": list(check_launchers(environment)),
            "Run folder": list(check_run_folder(command.out)),
        }
    for title, findings in groups.items():
        print_table(title, ("", "", ""), [(each.state, each.name, each.text) for each in findings])
    faults = sum(finding.state == "FAULT" for findings in groups.values() for finding in findings)
    if specs:
        with _busy(f"opening {counted(len(specs), 'slide')}"):
            checks = sorted(check_slides(specs, usable_cores()), key=lambda check: check.slide_id)
        print_table(
            f"Slides in {command.slides}",
            ("slide", "backend", "mpp", "size in px", "levels", "other images", "faults"),
            [_row(check) for check in checks],
        )
        faults += sum(bool(check.faults) for check in checks)
    print(f"\n{counted(faults, 'fault')}")
    return FAILED if faults else OK


def _row(check: SlideCheck) -> tuple[str, ...]:
    mpp = "–" if check.mpp is None else f"{check.mpp:.4g}"
    size, levels = (f"{check.width} x {check.height}", str(check.levels)) if check.levels else ("–", "–")
    others = "; ".join(check.other_images) or ("none" if check.levels else "–")
    return (check.slide_id, check.backend, mpp, size, levels, others, "; ".join(check.faults) or "none")


@contextmanager
def _busy(what: str) -> Iterator[None]:
    """A spinner on a terminal, a line elsewhere."""
    if sys.stdout.isatty():
        with Console().status(what):
            yield
    else:
        print(f"{what} ...", flush=True)
        yield


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(DoctorCommand, doctor, argv, prog="python -m app.doctor")


if __name__ == "__main__":
    sys.exit(main())
