"""The largest tile that trains within 16 GB, 80 GB and the whole card: plain, recomputed, offloaded, both.

Takes nothing; gives a row per limit, model and way: the largest side that really trained a step, the smallest that did
not and why, and what was predicted. On a GPU the allocator enforces the limit; on a CPU the bytes of living tensors are
counted against it. The search begins at the predicted side and ends when its time does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from app.task import Workload
from benchmarks.gpu.offload_time import USUAL
from benchmarks.gpu.setting import GIB, MIB, Row, Setting, attempt, forget, told
from benchmarks.gpu.work import CLASSES, Problem, Work
from parallel.keeping.kept_bytes import kept_bytes
from parallel.keeping.rule import Keeping
from parallel.live_bytes import LiveBytes
from parallel.memory import rank_bytes
from parallel.partition import Partition
from parallel.schedules.registry import build_schedule, placement_for

MODELS, TINY_MODELS = ("resnet50", "unet"), ("resnet18",)
LIMITS, TINY_LIMITS = (16 * GIB, 80 * GIB, None), (160 * MIB,)
"""Bytes; None: what the card has."""
STEP = 64
"""Px that sides are multiples of."""
FINE = 1.03
"""Sides that differ by less are as good as the same."""
RESERVE = 0.95
"""Part of a GPU's limit that living tensors may fill: the allocator's blocks and the libraries' work space take the
rest."""
HOST = 0.5
"""Part of the machine's memory that offloading may take."""
MOST_PX, MOST_TRIALS = 1 << 15, 6
HEADER = ("limit, GiB", "model", "way", "predicted px", "trained px", "does not train, px", "why", "step, s")


def ways(setting: Setting) -> dict[str, Keeping]:
    host = _host_bytes() if setting.full else None
    offload = {"offload": "overlap", "ahead": setting.of(USUAL, 0), "smallest": setting.of(MIB, 1), "host_bytes": host}
    return {
        "plain": Keeping(),
        "recompute": Keeping(recompute="block"),
        "offload": Keeping(**offload),
        "recompute, offload": Keeping(recompute="block", **offload),
    }


def rows(setting: Setting) -> Iterator[Row]:
    cases = [
        (limit, model, way, keeping)
        for limit in setting.of(LIMITS, TINY_LIMITS)
        for model in setting.of(MODELS, TINY_MODELS)
        for way, keeping in ways(setting).items()
    ]
    for number, (limit, model, way, keeping) in enumerate(cases):
        if setting.full and limit is not None and limit > torch.cuda.mem_get_info(setting.device)[1]:
            continue
        part = setting.part(2 * setting.left_s / (len(cases) - number))
        bytes_ = torch.cuda.mem_get_info(setting.device)[1] if limit is None else limit
        yield attempt(
            {"limit_bytes": bytes_, "model": model, "way": way},
            functools.partial(_search, part, bytes_, model, keeping),
        )


def _search(setting: Setting, limit: int, model: str, keeping: Keeping) -> Row:
    predicted = predicted_px(setting, limit, model, keeping)
    low, high, why, step_s, trials = 0, MOST_PX, "", 0.0, 0
    px = max(STEP, predicted)
    while px > low and high > max(STEP, FINE * low) and trials < MOST_TRIALS and (setting.left_s > 0 or not trials):
        trials += 1
        fault, taken = _trial(setting, limit, model, px, keeping)
        if fault is None:
            low, step_s = px, taken
            px = _whole(px * 1.1) if high == MOST_PX else _whole((low + high) / 2)
        else:
            high, why = px, fault
            px = _whole(px / 1.1) if not low else _whole((low + high) / 2)
        if not low < px < high:
            break
    return {
        "predicted_px": predicted,
        "trained_px": low,
        "failed_px": None if high == MOST_PX else high,
        "why": why,
        "step_s": step_s,
        "trials": trials,
    }


def _trial(setting: Setting, limit: int, model: str, px: int, keeping: Keeping) -> tuple[str | None, float]:
    """Why one step does not train within the limit, or None; and its seconds."""
    try:
        return None, (_step_on_gpu if setting.full else _step_counted)(setting, limit, model, px, keeping)
    except Exception as fault:  # see ``attempt``
        return told(fault), 0.0
    finally:
        forget()


def _step_on_gpu(setting: Setting, limit: int, model: str, px: int, keeping: Keeping) -> float:
    total = torch.cuda.mem_get_info(setting.device)[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), setting.device)
    try:
        work = Work(Problem(setting, model, px), keeping)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work.step()
        end.record()
        end.synchronize()
        work.close()
        return begin.elapsed_time(end) / 1000
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, setting.device)


def _step_counted(setting: Setting, limit: int, model: str, px: int, keeping: Keeping) -> float:
    problem = Problem(setting, model, px)
    work = Work(problem, keeping)
    state = [each["momentum_buffer"] for each in problem.optimizer.state.values()]
    with LiveBytes() as live:
        live.add([*problem.traced.model.parameters(), *state, problem.microbatch.images])
        work.step()
    work.close()
    if live.peak_bytes > limit:
        raise MemoryError(f"{live.peak_bytes} bytes lived at a time")
    return 0.0


def predicted_px(setting: Setting, limit: int, model: str, keeping: Keeping) -> int:
    """The largest side whose step is predicted to stay within the limit."""
    room = setting.of(RESERVE, 1.0) * limit

    def fits(px: int) -> bool:
        return _predicted_bytes(setting, model, px, keeping) <= room

    low, high = 0, STEP
    while high < MOST_PX and fits(high):
        low, high = high, 2 * high
    while high - low > STEP and high > FINE * low:
        middle = _whole((low + high) / 2)
        if not low < middle < high:
            break
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@functools.cache
def _graph(model: str, px: int) -> Partition:
    return Partition(Workload(model, px, CLASSES, optimizer="sgd").trace(), (0,))


def _predicted_bytes(setting: Setting, model: str, px: int, keeping: Keeping) -> int:
    partition = _graph(model, px)
    placement = placement_for("1f1b", groups=1, depth=1, chunks=1)
    schedule = build_schedule("1f1b", placement, 1)
    found = kept_bytes(partition, keeping)
    (rank,) = rank_bytes(partition, placement, schedule, slots=1, stages=found, device=setting.device.type)
    return rank.total


def _whole(px: float) -> int:
    return max(STEP, round(px / STEP) * STEP)


def _host_bytes() -> int:
    from app.machine import memory_bytes

    return round(HOST * memory_bytes()[1])


def line(row: Row) -> tuple[str, ...]:
    return (
        f"{row['limit_bytes'] / GIB:.1f}",
        row["model"],
        row["way"],
        str(row["predicted_px"]),
        str(row["trained_px"]),
        "-" if row["failed_px"] is None else str(row["failed_px"]),
        row["why"] or "-",
        f"{row['step_s']:.2f}",
    )
