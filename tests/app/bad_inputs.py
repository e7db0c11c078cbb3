"""Wrong input and what is said about it: ``python -m tests.app.bad_inputs`` prints command, message and exit code.

Every case is a real command on real files in a temporary folder, carried out in this process unless it needs limits of
its own; ``test_bad_inputs`` holds each to its message.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from app import synth
from tests.helpers.in_process import call

ROOT = Path(__file__).parents[2]
SVS = ROOT / "data" / "real" / "CMU-1-Small-Region.svs"
TRAIN = "app.train --slides {d} --out {out} --model tests.helpers.tiny_models:classifier --tile 256 --batch 4 --steps 2"
TRAIN += " --validation-tiles=2 --twin-steps=0"


@dataclass(frozen=True)
class Case:
    """One wrong input.

    Attributes:
        make: puts files into the slides folder ``d``.
        command: with ``{d}``, ``{out}`` to be filled in.
        code: exit code that is documented for it.
        says: part of what is printed.
        prefix: shell words before the command, for limits.
        also: further parts of what is printed.
    """

    name: str
    make: Callable[[Path], None]
    command: str
    code: int
    says: str
    prefix: str = ""
    also: tuple[str, ...] = ()


@functools.cache
def _made() -> Path:
    """Four good slides, drawn once."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    with contextlib.redirect_stdout(io.StringIO()):
        synth.main([str(folder), "--slides", "4", "--size", "1024", "--task", "classify"])
    return folder


def slides(folder: Path, labels: str = "slide_0000,a\nslide_0001,b\nslide_0002,a\nslide_0003,b\n") -> None:
    """Four good slides, and labels for them."""
    shutil.copytree(_made(), folder, dirs_exist_ok=True)
    (folder / "labels.csv").write_text("slide,label\n" + labels if labels else "")
    if not labels:
        (folder / "labels.csv").unlink()


def damaged(folder: Path) -> None:
    """Four good slides and four bad files, labelled like them."""
    slides(folder)
    bad = {
        "cut.svs": SVS.read_bytes()[:900_000],
        "zero.svs": b"",
        "page.svs": HTML,
        "photo.svs": next((ROOT / "data/nuclei/images").glob("*.png")).read_bytes(),
    }
    for name, content in bad.items():
        (folder / name).write_bytes(content)
        with (folder / "labels.csv").open("a") as file:
            file.write(f"{name},a\n")


def only(content: bytes) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        for k, label in enumerate("ab"):
            (folder / f"bad{k}.svs").write_bytes(content)
            with (folder / "labels.csv").open("a") as file:
                file.write(f"{'' if k else 'slide,label' + chr(10)}bad{k},{label}\n")

    return make


def nothing(folder: Path) -> None:
    """An empty folder."""


def unwritable(folder: Path) -> None:
    """The run folder's place is taken by a file, which no user, root included, can write into as a folder."""
    slides(folder)
    (folder.parent / "out").write_text("a file")


def held(folder: Path) -> None:
    """The run folder holds a run."""
    slides(folder)
    run(TRAIN.format(d=folder, out=folder.parent / "out"))


def full_disk(folder: Path) -> None:
    """A run with a checkpoint, to be resumed where no file may grow beyond 3 MB."""
    slides(folder)
    run(RESNET.replace("--steps 3 --resume --extend", "--steps 1").format(d=folder, out=folder.parent / "out"))


HTML = b"<!DOCTYPE html><html><body>404 not found</body></html>"
RESNET = TRAIN.replace("tests.helpers.tiny_models:classifier", "resnet18").replace(
    "--steps 2", "--steps 3 --resume --extend"
)

CASES = [
    Case("empty folder", nothing, TRAIN, 2, "no slide"),
    Case("folder that is not there", nothing, TRAIN.replace("{d}", "{d}/nowhere"), 2, "nowhere"),
    Case("no labels", lambda d: slides(d, ""), TRAIN, 2, "4. a sub-folder per class"),
    Case(
        "label for an unknown slide",
        lambda d: slides(d, "slide_0000,a\nslide_0001,b\nslide_0002,a\nslide_0003,b\nghost,b\n"),
        TRAIN,
        0,
        "ghost",
    ),
    Case(
        "slide without label",
        lambda d: slides(d, "slide_0000,a\nslide_0001,b\nslide_0002,a\n"),
        TRAIN + " --validation 0",
        0,
        "slide_0003",
    ),
    Case("one class only", lambda d: slides(d, "slide_0000,a\nslide_0001,a\n"), TRAIN, 2, "at least two classes"),
    Case(
        "bad slides among good ones",
        damaged,
        TRAIN,
        0,
        "cut: failed at open",
        also=("the file is empty", "the content is HTML, not a slide", "photo: failed at open"),
    ),
    Case("every slide bad", only(HTML), TRAIN, 1, "none of 2 slides can be used"),
    Case("tile larger than the slides", slides, TRAIN.replace("--tile 256", "--tile 4096"), 1, "4096"),
    Case("mpp that no level can give", slides, TRAIN + " --mpp 0.1", 1, "0.1"),
    Case("absurd mpp", slides, TRAIN + " --slide-mpp 1000", 2, "must be between 0.05 and 100 um/px; got 1000"),
    Case("run folder that cannot be written", unwritable, TRAIN, 1, "cannot be written"),
    Case("run folder that holds a run", held, TRAIN, 2, "already holds a run"),
    Case("disk full while saving", full_disk, RESNET, 1, "the previous one is kept", "ulimit -f 3000;"),
    Case("unknown model", slides, TRAIN + " --model resnet19", 2, "a ResNet has depth 18"),
    Case("model of the other task", slides, TRAIN + " --model unet_w4", 2, "choose a classification --model"),
    Case("unknown option", slides, TRAIN + " --bacth 3", 2, "--bacth"),
    Case("value of the wrong kind", slides, TRAIN + " --lr fast", 2, "--lr"),
    Case("more ranks than tiles", slides, TRAIN + " --ranks 8 --parallel ddp", 2, "every rank needs a microbatch"),
    Case("benchmark of no folder", nothing, "app.bench --slides {d}/nowhere --out {out}", 2, "nowhere does not exist"),
    Case(
        "folder in place of a checkpoint",
        nothing,
        "app.predict --slides {d} --checkpoint {d} --out {out}",
        2,
        "best.pt of a run",
    ),
    Case("drawings that are not there", nothing, "app.convert {d}/nowhere {out}", 2, "nowhere is none. Check the path"),
    Case(
        "config that is not there", slides, TRAIN + " --config {d}/my.yaml", 2, "my.yaml cannot be read: No such file"
    ),
    Case("weights file that is none", slides, TRAIN + " --weights {d}/labels.csv", 2, "--weights"),
]


def run(command: str, prefix: str = "", timeout_s: float = 150) -> subprocess.CompletedProcess[str]:
    """A command line, as ``python -m`` runs it; in a process of its own if words go before it."""
    if not prefix:
        return call(*shlex.split(command), env={"COLUMNS": "200"})
    line = f"{prefix} exec {shlex.quote(sys.executable)} -m {command}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(
        ["bash", "-c", line], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s
    )


def carry_out(case: Case, folder: Path) -> subprocess.CompletedProcess[str]:
    """Make the case's files under ``folder`` and run its command."""
    slides_folder = folder / "slides"
    slides_folder.mkdir(parents=True)
    case.make(slides_folder)
    return run(case.command.format(d=slides_folder, out=folder / "out"), case.prefix)


def main() -> None:
    for case in CASES:
        folder = Path(tempfile.mkdtemp())
        done = carry_out(case, folder)
        said = (done.stdout + done.stderr).splitlines()
        lines = [line for line in said if any(each in line for each in (case.says, *case.also))] or [done.stderr]
        shutil.rmtree(folder)
        command = case.prefix + " python -m " + case.command.format(d="DIR", out="RUN")
        print(
            f"{case.name}\n  $ {command.strip()}\n  exit {done.returncode}: "
            + "\n          ".join(line.strip().replace(str(folder), "") for line in lines)
        )


if __name__ == "__main__":
    main()
