"""Environment of a run: versions, processor, memory, GPUs and launcher, for ``env.json`` and ``app.doctor``.

Takes nothing; returns plain values that JSON can hold. No user names, host names or paths: a run folder is handed on.
torch is imported only where its answer is asked for.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from app.launch.host import memory_bytes, usable_cores
from app.settings.launcher import slurm_variables, started_by_us
from parallel.profile.cache import cpu_model

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
"""Where the packages lie; of a checkout, its root."""
PACKAGES = ("torch", "torchvision", "timm", "numpy", "openslide-python", "tifffile", "imagecodecs", "zarr", "mpi4py")
"""Distributions whose version changes pixels, numbers or speed."""
LAUNCHERS = ("torchrun", "mpirun", "srun")
RANK_VARIABLES = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_NNODES", "SLURM_CPUS_PER_TASK"),
    "mpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"),
}
"""Variables by which a launcher tells a process its place; the first one present decides."""
COMMAND_S = 20.0
"""Longest wait for an outside command: nvidia-smi can hang when a driver is ill."""


def describe_environment() -> dict[str, Any]:
    """Return everything about the machine and the versions that a later reader of a run needs."""
    return {
        "megatile": describe_checkout(),
        "python": platform.python_version(),
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {name: package_version(name) for name in PACKAGES},
        # In a process of its own: ``app`` imports no slide library.
        "openslide_library": output_of(
            [sys.executable, "-c", "import openslide; print(openslide.__library_version__)"]
        ),
        "cpu": {"model": cpu_model(), "cores": usable_cores(), "cores_of_machine": os.cpu_count()},
        "memory_bytes": memory_bytes()[0],
        **describe_gpus(),
        "launcher": describe_launcher(),
    }


def package_version(name: str) -> str | None:
    """Return the version of an installed distribution, None when it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe_checkout() -> dict[str, Any]:
    """Return MegaTile's version; in a git checkout also the commit and whether files were changed since."""
    git = ["git", "-C", str(ROOT)]
    commit = output_of([*git, "rev-parse", "HEAD"]) if (ROOT / ".git").exists() else None
    changed = bool(output_of([*git, "status", "--porcelain", "--untracked-files=no"])) if commit else None
    return {"version": package_version("megatile"), "commit": commit, "changed": changed}


def describe_gpus() -> dict[str, Any]:
    """``gpus``: name, memory_bytes, capability, bf16 (and TF32) and missing_kernels of each; ``cuda`` of the torch
    build; ``driver`` version."""
    import torch

    from parallel.profile.gpu import describe_gpus as find_gpus

    try:
        gpus = find_gpus()
    except OSError as fault:
        log.warning("%s", fault)
        gpus = []
    versions = output_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return {"gpus": gpus, "cuda": torch.version.cuda, "driver": versions.splitlines()[0] if versions else None}


def describe_launcher() -> dict[str, Any]:
    """``found``: launcher -> is it there; ``started_by`` one of them or None; ``variables`` that show it."""
    told = {} if started_by_us() else dict(RANK_VARIABLES)
    if slurm_variables() is None:  # a batch script, or a step of one task: Slurm has started no ranks
        told.pop("slurm", None)
    variables = {name: os.environ[name] for names in told.values() for name in names if os.environ.get(name)}
    started_by = next((who for who, names in told.items() if any(n in variables for n in names)), None)
    if started_by == "torchrun" and "TORCHELASTIC_RUN_ID" not in os.environ and "slurm" in told:
        started_by = "slurm"  # a rank of srun that has been given torchrun's variables to join the others
    found = {name: find_program(name) is not None for name in LAUNCHERS}
    return {"found": found, "started_by": started_by, "variables": variables}


def find_program(name: str) -> str | None:
    """Return the path of a program on PATH or in the folder of this Python, whose environment may not be active."""
    beside = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    return shutil.which(name, path=beside)


def output_of(command: list[str]) -> str | None:
    """Return the output of a command, stripped; None when it prints nothing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
