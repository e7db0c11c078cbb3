"""Check machine, run folder and slides before training: ``python -m app.doctor [--slides DIR]``.

Looks at versions, devices, memory, slide backends, launchers and the run folder; with ``--slides`` at every slide.
Each is really used, not only listed. Exit code 1 when something that training needs is faulty.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console

from app.checks.host import check_devices, check_launchers, check_memory, check_run_folder, check_versions
from app.checks.slides import SlideCheck, check_backends, check_slides
from app.launch.host import usable_cores
from app.settings.cli import FAILED, OK, run_command
from app.settings.console import print_findings, print_table
from app.training.run_info import describe_environment
from pipelines.catalog.catalog import SlideSpec, find_slides
from pipelines.catalog.table import counted
from pipelines.labels.slide_labels import read_mpp


@dataclass(frozen=True)
class DoctorCommand:
    """Say whether this machine, the run folder and the slides are fit for training, and what is missing."""

    slides: Path | None = None
    """Folder of whole-slide images to open and read from, searched with its sub-folders."""
    out: Path = Path("runs/train")
    """Run folder whose disk is tried."""
    slide_mpp: float | None = None
    """um/px of level 0 for every slide, instead of what the files say; --mpp-table goes before it."""
    mpp_table: Path | None = None
    """CSV with columns slide and mpp: um/px of level 0 by slide, instead of what the files say. Default: column mpp of
    labels.csv in --slides, if there is one."""
    scene: int | None = None
    """Image of a slide file that holds several of similar size, counted from 0; other files are not affected.
    Default: such files are refused, with a list of their images."""
    backend: Literal["auto", "tiled", "ndpi", "openslide", "zarr", "image"] = "auto"
    """Slide reader; auto takes the fastest that reads the file exactly."""


def doctor(command: DoctorCommand) -> int:
    """Look at everything, print it, and count the faults."""
    specs: tuple[SlideSpec, ...] = ()
    if command.slides:
        specs = find_slides(
            command.slides,
            mpp=command.slide_mpp,
            mpp_by_slide=read_mpp(command.slides, command.mpp_table),
            backend=command.backend,
            scene=command.scene,
        )
    with _busy("looking at the machine"):
        environment = describe_environment()
        groups = {
            "Versions": list(check_versions(environment)),
            "Devices": list(check_devices(environment)),
            "Memory and limits": list(check_memory()),
            "Slide backends": check_backends(),
            "Launchers": list(check_launchers(environment)),
            "Run folder": list(check_run_folder(command.out)),
        }
    for title, findings in groups.items():
        print_findings(title, findings)
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
