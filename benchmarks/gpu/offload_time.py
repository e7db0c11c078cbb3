"""Cost of keeping less: the step with offload, recomputation or boxes over the plain step, and the bytes it keeps.

Takes nothing; gives a row per model, tile and way. Steps take turns with plain ones, and the ratio is the median over
the turns. Each copy is timed in a step of its own: next to the bandwidth of the link, that tells whether copies or
computation bound the step. Asked: at most 1.10 times the plain step at half of its activation bytes or less.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator

from benchmarks.gpu.setting import MIB, Row, Setting, attempt, fault_line, forget, shown
from benchmarks.gpu.work import Problem, Work, copied, in_turns, kept_bytes, offloading
from parallel.memory.policy import ActivationPolicy

CASES = (("resnet50", 1024), ("unet", 512), ("resnet50", 2048), ("unet", 1024))
TINY = (("resnet18", 64), ("unet_w16", 64))
MOST = 1 << 62
"""Bytes of maps between boxes that may stay on the GPU: all."""
ASKED_RATIO, ASKED_SHARE = 1.10, 0.5
HEADER = ("model", "px", "way", "plain step, s", "over plain", "kept, MiB", "of plain", "allocated at most, MiB")
HEADER += ("moved out, GB", "out, GB/s", "back, GB/s", "asked")


def rows(setting: Setting) -> Iterator[Row]:
    for part, (model, px) in setting.shared(setting.of(CASES, TINY)):
        yield from _case(part, model, px)


def ways(px: int, kept_bytes: int, tiny: bool) -> dict[str, ActivationPolicy]:
    """Return policies by name. Parts of the activations are moved by giving the host room for no more.

    Args:
        px: side of a tile; boxes have half of it.
        kept_bytes: of the plain step.
        tiny: move small tensors too, as there are no others.
    """
    return {
        "plain": ActivationPolicy(),  # next to itself: what the other ratios are sure to
        "offload": offloading(tiny),
        "offload half": offloading(tiny, host_bytes=kept_bytes // 2),
        "recompute block": ActivationPolicy(recompute="block"),
        "recompute block, offload": offloading(tiny, recompute="block"),
        "boxes, maps on the GPU": ActivationPolicy(stream=px // 2, map_bytes=MOST),
        "boxes, maps on the host": ActivationPolicy(stream=px // 2, map_bytes=0),
    }


def _case(setting: Setting, model: str, px: int) -> Iterator[Row]:
    what = {"model": model, "px": px}
    try:
        problem = Problem(setting, model, px)
        plain_bytes = kept_bytes(problem, ActivationPolicy())
    except Exception as fault:  # see ``attempt``
        yield {**what, "way": "plain", "fault": fault_line(fault)}
        forget()
        return
    for part, (way, policy) in setting.shared(list(ways(px, plain_bytes, not setting.full).items())):
        yield attempt({**what, "way": way}, functools.partial(_compared, part, problem, plain_bytes, policy))


def _compared(setting: Setting, problem: Problem, plain_bytes: int, policy: ActivationPolicy) -> Row:
    kept = kept_bytes(problem, policy)
    plain, other = Work(problem, ActivationPolicy()), Work(problem, policy)
    plain.step()
    other.step()
    peak = other.peak_bytes()
    taken = in_turns(setting, {"plain": plain.step, "other": other.step})
    other.clock.times.clear()
    other.clock.on = True
    other.step()
    moved = copied(other.clock)
    plain.close()
    other.close()
    ratio = statistics.median(b / a for a, b in zip(*taken.values(), strict=True))
    return {
        "plain_s": statistics.median(taken["plain"]),
        "step_s": statistics.median(taken["other"]),
        "ratio": ratio,
        "turns": len(taken["plain"]),
        "kept_bytes": kept,
        "plain_kept_bytes": plain_bytes,
        "peak_bytes": peak,
        "met": ratio <= ASKED_RATIO and kept <= ASKED_SHARE * plain_bytes,
        **moved,
    }


def line(row: Row) -> tuple[str, ...]:
    return (
        *(str(row[key]) for key in ("model", "px", "way")),
        f"{row['plain_s']:.3f}",
        f"{row['ratio']:.2f}",
        shown(row["kept_bytes"], MIB),
        f"{row['kept_bytes'] / row['plain_kept_bytes']:.0%}",
        shown(row["peak_bytes"], MIB),
        shown(row["out_bytes"], 1e9, 2),
        *(shown(row[f"{way}_bytes_per_s"], 1e9, 1) for way in ("out", "back")),
        "met" if row["met"] else "missed",
    )
