"""Precision: images per second and memory in TF32 and bfloat16 compared with float32, with and without offload.

Takes nothing; gives a row per model and type. Steps take turns. float32 is without TF32, as ``--precision fp32``. A
CPU has no TF32: there it is float32.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator

import torch

from benchmarks.gpu.setting import MIB, Row, Setting, attempt, shown
from benchmarks.gpu.work import Problem, Work, in_turns, kept_bytes, offloading
from parallel.memory.policy import ActivationPolicy
from parallel.profile.gpu import set_tf32

CASES = (("resnet50", 1024, 4), ("unet", 512, 4))
TINY = (("resnet18", 64, 1),)
TYPES = {"float32": None, "tf32": None, "bfloat16": torch.bfloat16}
HEADER = ("model", "px", "tiles", "type", "offload", "images/s", "over float32", "kept, MiB", "allocated at most, MiB")


def rows(setting: Setting) -> Iterator[Row]:
    cases = [(*case, offload) for case in setting.of(CASES, TINY) for offload in ("none", "overlap")]
    for part, case in setting.shared(cases):
        what = dict(zip(("model", "px", "tiles", "offload"), case, strict=True))
        found = attempt(what, functools.partial(_case, part, *case))
        yield from ({**what, **row} for row in found["rows"]) if "rows" in found else (found,)


def _case(setting: Setting, model: str, px: int, tiles: int, offload: str) -> Row:
    policy = ActivationPolicy() if offload == "none" else offloading(not setting.full)
    problem = Problem(setting, model, px, tiles=tiles)
    kept = {name: kept_bytes(problem, policy, dtype) for name, dtype in TYPES.items()}
    works = {name: Work(problem, policy, autocast=dtype) for name, dtype in TYPES.items()}

    def step(name: str) -> None:
        set_tf32(name == "tf32")
        works[name].step()

    peaks = {}
    for name, work in works.items():
        step(name)
        peaks[name] = work.peak_bytes()
    taken = in_turns(setting, {name: functools.partial(step, name) for name in works})
    for work in works.values():
        work.close()
    return {
        "rows": [
            {
                "type": name,
                "images_per_second": tiles / statistics.median(taken[name]),
                "ratio": statistics.median(a / b for a, b in zip(taken["float32"], taken[name], strict=True)),
                "kept_bytes": kept[name],
                "peak_bytes": peaks[name],
            }
            for name in works
        ]
    }


def line(row: Row) -> tuple[str, ...]:
    return (
        *(str(row[key]) for key in ("model", "px", "tiles", "type", "offload")),
        f"{row['images_per_second']:.1f}",
        f"{row['ratio']:.2f}",
        *(shown(row[key], MIB) for key in ("kept_bytes", "peak_bytes")),
    )
