"""The largest tile that trains within 16 GB, 80 GB and the whole card: plain, recomputed, offloaded, both.

Takes nothing; gives a row per limit, model and way: the largest side that really trained a step, the smallest that did
not and why, and what was predicted. On a GPU the allocator enforces the limit; on a CPU the bytes of living tensors are
counted against it. The search begins at the predicted side and ends when its time does.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator

import torch

from app.launch.host import memory_bytes
from app.planning.workload import Workload
from benchmarks.gpu.setting import GIB, MIB, Row, Setting, attempt, fault_line, forget, shown
from benchmarks.gpu.work import CLASSES, Problem, Work, offloading
from parallel.graph.partition import Partition
from parallel.memory.policy import ActivationPolicy
from parallel.memory.rank_bytes import rank_bytes
from parallel.memory.stage_bytes import StageMemory
from parallel.offload.live_bytes import LiveBytes
from parallel.schedule.registry import build_schedule, mesh_for

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
HOST = 0.3
"""Part of the machine's memory that offloading may take; torch rounds pinned memory up, to twice as much at worst."""
TRACED, TINY_TRACED = (2048, 4096), (512, 1024)
"""Sides at which bytes are predicted, so large that passes take more than updates; they grow with the area."""
FIRST_PX, TINY_FIRST_PX = 256, 64
"""Side of the tile that a model is traced with."""
STRIDE = 1.1
"""From one trial to the next, and more each time, while none has trained, or none has failed."""
MOST_PX, MOST_TRIALS, MOST = 1 << 15, 6, 1 << 62
HEADER = ("limit, GiB", "model", "way", "predicted px", "trained px", "does not train, px", "why", "step, s")


def ways(setting: Setting) -> dict[str, ActivationPolicy]:
    offload = functools.partial(
        offloading, not setting.full, host_bytes=round(HOST * memory_bytes()[1]) if setting.full else None
    )
    return {
        "plain": ActivationPolicy(),
        "recompute": ActivationPolicy(recompute="block"),
        "offload": offload(),
        "recompute, offload": offload(recompute="block"),
    }


def rows(setting: Setting) -> Iterator[Row]:
    total = torch.cuda.mem_get_info(setting.device)[1] if setting.full else None
    limits = [limit or total for limit in setting.of(LIMITS, TINY_LIMITS) if limit is None or limit < (total or MOST)]
    problems = list(itertools.product(limits, setting.of(MODELS, TINY_MODELS)))
    for part, (limit, model) in setting.shared(problems, 2):
        what = {"limit_bytes": limit, "model": model}
        try:
            problem = Problem(setting, model, setting.of(FIRST_PX, TINY_FIRST_PX))
        except Exception as fault:  # see ``attempt``
            yield {**what, "fault": fault_line(fault)}
            continue
        for share, (way, policy) in part.shared(list(ways(setting).items())):
            search = functools.partial(_search, share, problem, limit, model, policy)
            yield attempt({**what, "way": way, "host_bytes": policy.host_bytes}, search)
        del problem, search
        forget()


def _search(setting: Setting, problem: Problem, limit: int, model: str, policy: ActivationPolicy) -> Row:
    """Bisection between what trained and what did not, from the predicted side on."""
    predicted = predicted_px(setting, limit, model, policy)
    low, high, why, step_s, trials = 0, MOST_PX, "", 0.0, 0
    px = predicted
    while low < px < high and trials < MOST_TRIALS and (setting.left_s > 0 or not trials):
        trials += 1
        fault, taken = _trial(problem, limit, px, policy)
        if fault is None:
            low, step_s = px, taken
        else:
            high, why = px, fault
        if high <= max(low + STEP, FINE * low):
            break
        if not low:
            px = _whole(px / STRIDE**trials)
        elif high == MOST_PX:
            px = _whole(px * STRIDE**trials)
        else:
            px = _whole((low + high) / 2)
    return {
        "predicted_px": predicted,
        "trained_px": low,
        "failed_px": None if high == MOST_PX else high,
        "why": why,
        "step_s": step_s,
        "trials": trials,
    }


def _trial(problem: Problem, limit: int, px: int, policy: ActivationPolicy) -> tuple[str | None, float]:
    """Why one step does not train within the limit, or None; and its seconds."""
    try:
        return None, (_step_on_gpu if problem.setting.full else _step_counted)(problem, limit, px, policy)
    except Exception as fault:  # see ``attempt``
        return fault_line(fault), 0.0
    finally:
        forget()


def _step_on_gpu(problem: Problem, limit: int, px: int, policy: ActivationPolicy) -> float:
    device = problem.setting.device
    total = torch.cuda.mem_get_info(device)[1]
    problem.set_side(STEP)
    forget()
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
    try:
        problem.set_side(px)
        work = Work(problem, policy)
        step_s = problem.setting.seconds_of(work.step)
        work.close()
        return step_s
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def _step_counted(problem: Problem, limit: int, px: int, policy: ActivationPolicy) -> float:
    problem.set_side(px)
    problem.optimizer.zero_grad(set_to_none=True)
    work = Work(problem, policy)
    state = [each["momentum_buffer"] for each in problem.optimizer.state.values()]
    with LiveBytes() as live:
        live.add([*problem.traced.model.parameters(), *state, problem.microbatch.images])
        step_s = problem.setting.seconds_of(work.step)
    work.close()
    if live.peak_bytes > limit:
        raise MemoryError(f"{live.peak_bytes} bytes lived at a time")
    return step_s


def predicted_px(setting: Setting, limit: int, model: str, policy: ActivationPolicy) -> int:
    """The largest side whose step is predicted to stay within the limit; at least ``STEP``."""
    sides = setting.of(TRACED, TINY_TRACED)
    small, large = (_predicted_bytes(setting, model, px, policy) for px in sides)
    slope = (large - small) / (sides[1] ** 2 - sides[0] ** 2)
    room = setting.of(RESERVE, 1.0) * limit - (large - slope * sides[1] ** 2)
    return min(MOST_PX - STEP, max(STEP, math.isqrt(max(0, int(room / slope))) // STEP * STEP))


@functools.cache
def _graph(model: str, px: int) -> Partition:
    return Partition(Workload(model, px, CLASSES, optimizer="sgd").in_float32, (0,))


def _predicted_bytes(setting: Setting, model: str, px: int, policy: ActivationPolicy) -> int:
    partition = _graph(model, px)
    mesh = mesh_for("1f1b", groups=1, depth=1, chunks=1)
    schedule = build_schedule("1f1b", mesh, 1)
    stages = StageMemory(partition.graph).kept(partition, policy)
    (rank,) = rank_bytes(stages, mesh, schedule, slots=1, device=setting.device.type)
    return rank.total


def _whole(px: float) -> int:
    return max(STEP, round(px / STEP) * STEP)


def line(row: Row) -> tuple[str, ...]:
    cells = [row[key] for key in ("model", "way", "predicted_px", "trained_px", "failed_px", "why")]
    texts = ("-" if cell in (None, "") else str(cell) for cell in cells)
    return shown(row["limit_bytes"], GIB, 1), *texts, f"{row['step_s']:.2f}"
