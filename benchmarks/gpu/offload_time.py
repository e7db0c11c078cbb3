"""Cost of keeping less: the step with offload, recomputation or both over the plain step, and the bytes it keeps.

Takes nothing; gives a row per model, tile and way. Steps take turns with plain ones, and the ratio is the median over
the turns. Each copy is timed in a step of its own: next to the bandwidth of the link, that tells whether copies or
computation bound the step. Asked: at most 1.10 times the plain step at half of its activation bytes or less.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch

from benchmarks.gpu.setting import GIB, MIB, Row, Setting, attempt, fault_line, forget, seconds_of
from benchmarks.gpu.work import Problem, Work, kept_bytes
from parallel.memory.policy import ActivationPolicy

TILES: dict[str, tuple[int, ...]] = {"resnet50": (1024, 2048, 3072), "unet": (512, 1024, 1536)}
TINY: dict[str, tuple[int, ...]] = {"resnet18": (64,), "unet_w16": (64,)}
AHEAD = (0, 256 * MIB, GIB, 4 * GIB)
USUAL = GIB
LEAST_TURNS, MOST_TURNS = 2, 12
ASKED_RATIO, ASKED_SHARE = 1.10, 0.5
HEADER = (
    "model",
    "px",
    "way",
    "plain step, s",
    "over plain",
    "kept, MiB",
    "of plain",
    "allocated at most, MiB",
    "moved out, GB",
    "out, GB/s",
    "back, GB/s",
    "asked",
)


def rows(setting: Setting) -> Iterator[Row]:
    cases = [(model, px) for model, sizes in setting.of(TILES, TINY).items() for px in sizes]
    # Small tiles of every model first.
    cases.sort(key=lambda case: setting.of(TILES, TINY)[case[0]].index(case[1]))
    for number, (model, px) in enumerate(cases):
        yield from _case(
            setting.part(setting.left_s / (len(cases) - number)), model, px, thorough=setting.full and number < 2
        )


def ways(kept_bytes: int, tiny: bool, thorough: bool) -> dict[str, ActivationPolicy]:
    """Return policies by name. Parts of the activations are moved by giving the host room for no more.

    Args:
        kept_bytes: of the plain step.
        tiny: move small tensors too, as there are no others.
        thorough: try every window, too.
    """
    smallest = {"smallest": 1} if tiny else {}
    usual = ActivationPolicy(offload="overlap", ahead=0 if tiny else USUAL, **smallest)
    found = {
        "plain": ActivationPolicy(),  # next to itself: what the other ratios are sure to
        "offload": usual,
        "offload half": ActivationPolicy(offload="overlap", ahead=usual.ahead, host_bytes=kept_bytes // 2, **smallest),
        "recompute block": ActivationPolicy(recompute="block"),
        "recompute block, offload": ActivationPolicy(
            recompute="block", offload="overlap", ahead=usual.ahead, **smallest
        ),
    }
    if thorough:
        found |= {
            f"offload, ahead {ahead // MIB} MiB": ActivationPolicy(offload="overlap", ahead=ahead, **smallest)
            for ahead in AHEAD
            if ahead != usual.ahead
        }
    return found


def _case(setting: Setting, model: str, px: int, *, thorough: bool) -> Iterator[Row]:
    what = {"model": model, "px": px}
    try:
        problem = Problem(setting, model, px)
        plain_bytes = kept_bytes(problem, ActivationPolicy())
    except Exception as fault:  # see ``attempt``
        yield {**what, "way": "plain", "fault": fault_line(fault)}
        forget()
        return
    asked = ways(plain_bytes, not setting.full, thorough)
    for number, (way, policy) in enumerate(asked.items()):
        part = setting.part(setting.left_s / (len(asked) - number))

        def run(policy: ActivationPolicy = policy, part: Setting = part) -> Row:
            return _compared(part, problem, plain_bytes, policy)

        yield attempt({**what, "way": way}, run)


def _compared(setting: Setting, problem: Problem, plain_bytes: int, policy: ActivationPolicy) -> Row:
    kept = kept_bytes(problem, policy)
    plain, other = Work(problem, ActivationPolicy()), Work(problem, policy)
    plain.step()
    other.step()
    setting.settle()
    if setting.full:
        torch.cuda.reset_peak_memory_stats(setting.device)
    other.step()
    peak = torch.cuda.max_memory_allocated(setting.device) if setting.full else None
    taken: list[tuple[float, float]] = []
    while len(taken) < LEAST_TURNS or (setting.left_s > 0 and len(taken) < MOST_TURNS):
        taken.append((_step_s(setting, plain), _step_s(setting, other)))
    moved = _moved(setting, other)
    plain.close()
    other.close()
    ratio = statistics.median(b / a for a, b in taken)
    return {
        "plain_s": statistics.median(a for a, _ in taken),
        "step_s": statistics.median(b for _, b in taken),
        "ratio": ratio,
        "turns": len(taken),
        "kept_bytes": kept,
        "plain_kept_bytes": plain_bytes,
        "peak_bytes": peak,
        "met": ratio <= ASKED_RATIO and kept <= ASKED_SHARE * plain_bytes,
        **moved,
    }


def _step_s(setting: Setting, work: Work) -> float:
    with seconds_of(setting) as taken:
        work.step()
        return taken()


def _moved(setting: Setting, work: Work) -> Row:
    """Bytes of a step's copies and their bandwidth."""
    clock = work.clock
    clock.times.clear()
    clock.on = True
    work.step()
    setting.settle()
    found: Row = {}
    for way in ("out", "back"):
        own = [one for one in clock.times if one.direction == way]
        seconds = sum(one.seconds for one in own)
        found[f"{way}_bytes"] = sum(one.bytes for one in own)
        found[f"{way}_bytes_per_s"] = found[f"{way}_bytes"] / seconds if seconds else None
    clock.on = False
    return found


def line(row: Row) -> tuple[str, ...]:
    rates = [row[f"{way}_bytes_per_s"] for way in ("out", "back")]
    return (
        row["model"],
        str(row["px"]),
        row["way"],
        f"{row['plain_s']:.3f}",
        f"{row['ratio']:.2f}",
        f"{row['kept_bytes'] / MIB:.0f}",
        f"{row['kept_bytes'] / row['plain_kept_bytes']:.0%}",
        "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / MIB:.0f}",
        f"{row['out_bytes'] / 1e9:.2f}",
        *("-" if rate is None else f"{rate / 1e9:.1f}" for rate in rates),
        "met" if row["met"] else "missed",
    )
