"""Whether the quick lane finds what it is there for: faults put into copies of the project, one at a time.

``python tools/seeded_faults.py [NAME ...]`` prints which test of ``make test`` fails first for each. The files that are
nearest to a fault are run first, the rest of the lane only if they pass. Nothing in the working tree is changed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
QUICK = "not (process or slurm or browser or bench or readme or long)"


@dataclass(frozen=True)
class Fault:
    """A text substitution.

    Attributes:
        old: found once in ``file``.
        near: test files that are run first.
    """

    name: str
    file: str
    old: str
    new: str
    near: tuple[str, ...]


FAULTS = (
    Fault(
        "the gradients of a microbatch are lost",
        "parallel/engine/engine.py",
        "else shape[0] / work.batch)",
        "else (i != 1) * shape[0] / work.batch)",
        ("tests/parallel/engine/test_engine.py",),
    ),
    Fault(
        "all microbatches weigh the same, whatever their tiles",
        "parallel/engine/engine.py",
        "else shape[0] / work.batch)",
        "else 1 / work.m)",
        ("tests/parallel/engine/test_data_parallel.py",),
    ),
    Fault(
        "all microbatches drop the same values",
        "parallel/engine/step.py",
        '"{seed}/{step}/{i}"',
        '"{seed}/{step}/0"',
        (
            "tests/parallel/schedule/test_shares.py",
            "tests/parallel/stage/test_rng.py",
            "tests/parallel/engine/test_engine.py",
        ),
    ),
    Fault(
        "the gradient of a skip is detached",
        "models/unet.py",
        "torch.cat((skip, self.up(x)), dim=1)",
        "torch.cat((skip.detach(), self.up(x)), dim=1)",
        ("tests/models/test_unet.py",),
    ),
    Fault(
        "a residual is dropped",
        "models/resnet.py",
        "self.bn2(self.conv2(y)) + residual",
        "self.bn2(self.conv2(y)) + 0 * residual",
        ("tests/models/test_resnet.py",),
    ),
    Fault(
        "of a value that two stages use, one gradient counts",
        "parallel/engine/transfers.py",
        "        total += more",
        "        more += total",
        ("tests/parallel/engine/test_engine.py",),
    ),
    Fault(
        "the update of a step of another size is skipped",
        "parallel/engine/optimizer_step.py",
        "            self.optimizer.step()",
        "            self.optimizer.step() if scale == 1 else None",
        ("tests/parallel/engine/test_optimizer_step.py", "tests/parallel/engine/test_engine.py"),
    ),
    Fault(
        "batch norm counts recomputed passes",
        "parallel/stage/stage.py",
        "with self.statistics.frozen(), self._pass(random, shape, log), weights:",
        "with self._pass(random, shape, log), weights:",
        ("tests/parallel/engine/test_engine.py",),
    ),
    Fault(
        "chunks go backward in the order of forward",
        "parallel/schedule/generators.py",
        "for s in reversed(stages)",
        "for s in stages",
        ("tests/parallel/schedule", "tests/parallel/engine/test_engine.py"),
    ),
    Fault(
        "the optimizer starts anew when a run is resumed",
        "parallel/engine/state_dict.py",
        'if number in whole["state"]:',
        "if number < 0:",
        ("tests/parallel/engine/test_state_dict.py", "tests/parallel/engine/test_engine.py"),
    ),
    Fault(
        "a checkpoint misses the running statistics of its step",
        "app/checkpoint/two_phase.py",
        "if name in parameter_names}",
        "}",
        ("tests/app/checkpoint/test_two_phase.py",),
    ),
    Fault(
        "a resumed run reads its last batch again",
        "pipelines/stream/iterator.py",
        'self._batch = state["batch"]',
        'self._batch = max(0, state["batch"] - 1)',
        ("tests/pipelines/stream/test_stream.py",),
    ),
    Fault(
        "a tile begins one px to the right",
        "pipelines/slides/geometry.py",
        "l_x, l_y = l_from_l0(region.l0_x, level.downsample), ",
        "l_x, l_y = l_from_l0(region.l0_x, level.downsample) + 1, ",
        ("tests/pipelines/slides/test_geometry.py",),
    ),
    Fault(
        "a tile has the label of its neighbour",
        "pipelines/stream/batch.py",
        "slide_id: str, slide: Slide, region: Region, out: NDArray[Any], box: TileBox | None = None\n    ) -> None:\n"
        "        out[...] = self.by_row[row]",
        "slide_id: str, slide: Slide, region: Region, out: NDArray[Any], box: TileBox | None = None\n    ) -> None:\n"
        "        out[...] = self.by_row[row - 1]",
        ("tests/pipelines/stream/test_stream.py",),
    ),
    Fault(
        "a mask is not turned with its tile",
        "pipelines/stream/augment.py",
        'target[...] = varied["mask"]',
        'varied["mask"]',
        ("tests/pipelines/stream/test_augment.py",),
    ),
    Fault(
        "plans forget what the optimizer keeps",
        "parallel/memory/rank_bytes.py",
        "slots * sliced, 0, work, 0)",
        "0 * sliced, 0, work, 0)",
        ("tests/parallel/memory/test_rank_bytes.py",),
    ),
)


def copy_of(folder: Path) -> None:
    """The project's files, as git knows them."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    for command in (["git", "init", "--quiet"], ["git", "add", "--all"]):  # some tests ask git for files
        subprocess.run(command, cwd=folder, check=True)


def seeded(fault: Fault, folder: Path) -> None:
    """Put ``fault`` into the copy in ``folder``.

    Raises:
        ValueError: its place is not there, or not once.
    """
    path = folder / fault.file
    text = path.read_text()
    if (found := text.count(fault.old)) != 1:
        raise ValueError(f"{fault.name}: {fault.file} has {found} places that read {fault.old!r}; there must be one")
    path.write_text(text.replace(fault.old, fault.new))


def first_failure(folder: Path, tests: tuple[str, ...]) -> str | None:
    """The first test of the quick lane that fails there; None when all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", QUICK, "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder), "MEGATILE_BUSY": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if failed := re.search(r"^(?:FAILED|ERROR) (\S+?)(?:\[| - |$)", done.stdout, re.MULTILINE):
        return failed[1]
    if done.returncode:
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return None


def main() -> int:
    """Exit code 0: every fault was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="words of the names of some faults; all by default")
    asked = parser.parse_args().names
    chosen = [fault for fault in FAULTS if not asked or any(word in fault.name for word in asked)]
    print("| fault | in | first test of `make test` that fails |\n|---|---|---|", flush=True)
    missed = 0
    for fault in chosen:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            copy_of(folder)
            seeded(fault, folder)
            failed = first_failure(folder, fault.near) or first_failure(folder, ())
        missed += failed is None
        print(f"| {fault.name} | `{fault.file}` | {f'`{failed}`' if failed else 'none'} |", flush=True)
        print(f"{time.monotonic() - begun:.0f} s", file=sys.stderr)
    print(f"\n{len(chosen) - missed} of {len(chosen)} faults found")
    return missed > 0


if __name__ == "__main__":
    sys.exit(main())
