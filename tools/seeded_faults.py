"""Put faults into a copy of the project, one at a time, and print the test and the lane that find each.

``python tools/seeded_faults.py [WORD ...]`` takes the faults of ``seeded_faults.txt`` whose file or name has one of the
words, or all, and runs the test that is named there. Nothing in the working tree is changed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
QUICK = "not (process or slurm or browser or bench or readme or long)"
LANES = {"quick": ("-m", QUICK), "full": ("--full",)}
PASSED, FAILED, INTERNAL_ERROR, NONE_COLLECTED = 0, 1, 3, 5
"""Exit codes of pytest."""
LIBRARIES = ("cv2", "pyarrow.parquet", "shapely", "sklearn.metrics", "torch.fx", "torchvision", "tyro")
"""Loaded once for all runs: half of what a short one takes."""


class Fault(NamedTuple):
    """Replacement of ``old``, which occurs once in ``file``, and the name of the test that must fail then."""

    file: str
    name: str
    test: str
    old: str
    new: str


def read_faults() -> list[Fault]:
    """Return the faults of ``seeded_faults.txt``."""
    text = Path(__file__).with_suffix(".txt").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    threes = zip(lines[::3], lines[1::3], lines[2::3], strict=True)
    return [Fault(*head.split(" | "), old.removeprefix("- "), new.removeprefix("+ ")) for head, old, new in threes]


def files_of(test: str, root: Path = ROOT) -> list[str]:
    """Return the test files below ``root`` that define ``test``."""
    files = sorted((root / "tests").rglob("test_*.py"))
    return [str(file.relative_to(root)) for file in files if f"def {test}(" in file.read_text()]


def copy_project(folder: Path) -> None:
    """Copy the files that git knows into ``folder``, and add them to a repository there: some tests ask git."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    for command in (["git", "init", "--quiet"], ["git", "add", "--all"]):
        subprocess.run(command, cwd=folder, check=True)


@contextlib.contextmanager
def seeded(fault: Fault, folder: Path) -> Iterator[None]:
    """Return a context in which the copy in ``folder`` has ``fault``.

    Raises:
        ValueError: its place is not there, or not once.
    """
    path = folder / fault.file
    text = path.read_text()
    if (count := text.count(fault.old)) != 1:
        raise ValueError(f"{fault.name}: {fault.file} reads {fault.old!r} in {count} places; it must be one")
    path.write_text(text.replace(fault.old, fault.new))
    try:
        yield
    finally:
        path.write_text(text)


def failing_test(folder: Path, test: str, lanes: Iterable[str] = LANES) -> tuple[str, str] | None:
    """Return the first of ``lanes`` in which ``test`` fails in ``folder``, and its file.

    Raises:
        RuntimeError: pytest could not run it.
    """
    places = [f"{file}::{test}" for file in files_of(test, folder)]
    for lane in lanes:
        code, output = run_pytest(folder, ["-x", "-q", "-p", "no:cacheprovider", *LANES[lane], *places])
        if code not in (PASSED, FAILED, NONE_COLLECTED):
            raise RuntimeError(f"pytest {test} ended with {code}:\n{output}")
        if failed := re.search(r"^(?:FAILED|ERROR) (\S+?)::", output, re.MULTILINE):
            return lane, failed[1]
    return None


def run_pytest(folder: Path, arguments: Sequence[str]) -> tuple[int, str]:
    """Run pytest on the copy in ``folder`` in a fork, which has loaded the libraries; return exit code and output."""
    with tempfile.TemporaryFile("w+") as output:
        if not (child := os.fork()):
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            os.chdir(folder)
            os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder), "MEGATILE_BUSY": "1"}
            own = {str(ROOT), str(ROOT / "tools"), ""}
            sys.path[:] = [str(folder), *(path for path in sys.path if path not in own)]
            code = INTERNAL_ERROR
            try:
                code = int(pytest.main(list(arguments)))
            finally:  # nothing of the parent's is cleaned up here
                traceback.print_exc()
                sys.stdout.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(status), output.read()


def main() -> int:
    """Exit code 0: every fault was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="parts of files and names of faults; all by default")
    words = parser.parse_args().words
    faults = [f for f in read_faults() if not words or any(word in f"{f.file} {f.name}" for word in words)]
    print("| fault | in | found by | lane | s |\n|---|---|---|---|---|", flush=True)
    missed = 0
    for library in LIBRARIES:
        importlib.import_module(library)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_project(folder)
        places = [f"{file}::{test}" for test in {fault.test for fault in faults} for file in files_of(test, folder)]
        code, output = run_pytest(folder, ["-q", "-p", "no:cacheprovider", *LANES["quick"], *places])
        if code not in (PASSED, NONE_COLLECTED):
            raise RuntimeError(f"tests fail without a fault:\n{output}")
        for fault in faults:
            begun_s = time.monotonic()
            with seeded(fault, folder):
                found = failing_test(folder, fault.test)
            seconds = time.monotonic() - begun_s
            if found and found[0] != "quick" and failing_test(folder, fault.test, found[:1]):
                raise RuntimeError(f"{fault.test} fails without a fault, too")
            missed += found is None
            lane, file = found or ("none", "")
            where = f"`{file}`: `{fault.test}`" if found else f"not by `{fault.test}`"
            print(f"| {fault.name} | `{fault.file}` | {where} | {lane} | {seconds:.0f} |", flush=True)
    print(f"\n{len(faults) - missed} of {len(faults)} faults found")
    return missed > 0


if __name__ == "__main__":
    sys.exit(main())
