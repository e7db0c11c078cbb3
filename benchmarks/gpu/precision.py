"""Precision: images per second and memory in TF32 and bfloat16 compared with float32, with and without offload.

Takes nothing; gives a row per model and type. Steps take turns. float32 is without TF32, as ``--precision fp32``. A
CPU has no TF32: there it is float32.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch

from benchmarks.gpu.offload_time import LEAST_TURNS, MOST_TURNS, USUAL
from benchmarks.gpu.setting import MIB, Row, Setting, attempt, seconds_of
from benchmarks.gpu.work import Problem, Work, kept_bytes
from parallel.memory.policy import ActivationPolicy
from parallel.profile.gpu import set_tf32

CASES = (("resnet50", 1024, 4), ("unet", 512, 4))
TINY = (("resnet18", 64, 1),)
TYPES = {"float32": None, "tf32": None, "bfloat16": torch.bfloat16}
HEADER = ("model", "px", "tiles", "type", "offload", "images/s", "over float32", "kept, MiB", "allocated at most, MiB")


def rows(setting: Setting) -> Iterator[Row]:
    cases = [(*case, offload) for case in setting.of(CASES, TINY) for offload in ("none", "overlap")]
    for number, (model, px, tiles, offload) in enumerate(cases):
        part = setting.part(setting.left_s / (len(cases) - number))
        what = {"model": model, "px": px, "tiles": tiles, "offload": offload}

        def run(part: Setting = part, case: tuple[str, int, int, str] = (model, px, tiles, offload)) -> Row:
            return {"rows": _case(part, *case)}

        found = attempt(what, run)
        yield from ({**what, **row} for row in found["rows"]) if "rows" in found else (found,)


def _case(setting: Setting, model: str, px: int, tiles: int, offload: str) -> list[Row]:
    smallest = {} if setting.full else {"smallest": 1}
    policy = (
        ActivationPolicy()
        if offload == "none"
        else ActivationPolicy(offload="overlap", ahead=setting.of(USUAL, 0), **smallest)
    )
    problem = Problem(setting, model, px, tiles=tiles)
    kept = {name: kept_bytes(problem, policy, dtype) for name, dtype in TYPES.items()}
    works = {name: Work(problem, policy, autocast=dtype) for name, dtype in TYPES.items()}
    peaks: dict[str, int | None] = {}
    for name, work in works.items():
        set_tf32(name == "tf32")
        work.step()
        setting.settle()
        if setting.full:
            torch.cuda.reset_peak_memory_stats(setting.device)
        work.step()
        peaks[name] = torch.cuda.max_memory_allocated(setting.device) if setting.full else None
    taken: dict[str, list[float]] = {name: [] for name in works}
    while len(taken["float32"]) < LEAST_TURNS or (setting.left_s > 0 and len(taken["float32"]) < MOST_TURNS):
        for name, work in works.items():
            set_tf32(name == "tf32")
            with seconds_of(setting) as seconds:
                work.step()
                taken[name].append(seconds())
    found = [
        {
            "type": name,
            "images_per_second": tiles / statistics.median(taken[name]),
            "ratio": statistics.median(a / b for a, b in zip(taken["float32"], taken[name], strict=True)),
            "kept_bytes": kept[name],
            "peak_bytes": peaks[name],
        }
        for name in works
    ]
    for work in works.values():
        work.close()
    return found


def line(row: Row) -> tuple[str, ...]:
    return (
        row["model"],
        str(row["px"]),
        str(row["tiles"]),
        row["type"],
        row["offload"],
        f"{row['images_per_second']:.1f}",
        f"{row['ratio']:.2f}",
        f"{row['kept_bytes'] / MIB:.0f}",
        "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / MIB:.0f}",
    )
