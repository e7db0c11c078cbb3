"""What a sweep varies: settings of a run that let parts of it overlap, and which of their combinations are run.

Takes knobs, each with the value that overlaps nothing and those that do; gives settings, each knob with a value, as
flags of ``app.train``. Where all combinations are few they are all run; otherwise every knob alone, every two together,
and all at once.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from app.settings.gradient_faults import gradient_faults
from app.settings.strategy import StrategySettings

MOST = 16
"""Settings of a full factorial that is still small: four knobs of two values."""

Setting = tuple[tuple[str, str], ...]
"""Flag and value of every knob, in the order of the knobs; what ``Case.knobs`` takes."""


@dataclass(frozen=True)
class Knob:
    """A setting that overlaps something.

    Attributes:
        flag: of ``app.train``.
        off: the value with which nothing overlaps.
        on: those with which something does.
        what: runs beside what.
    """

    flag: str
    off: str
    on: tuple[str, ...]
    what: str

    @property
    def name(self) -> str:
        return self.flag.removeprefix("--")


KNOBS = (
    Knob("--read-ahead", "1KiB", ("1GiB",), "tiles are read while others are computed"),
    Knob("--read-threads", "1", ("2",), "two threads decode tiles"),
    Knob("--device-prefetch", "0", ("1",), "microbatches are made while others are computed"),
    Knob("--gradient-buckets", "0", ("25MiB",), "gradients are summed while others are computed"),
    Knob("--checkpoint-write", "blocking", ("two-phase",), "checkpoints are written beside the steps that follow"),
)
"""All there are. A budget of 1 KiB holds one batch: the next is read once it has been computed. Checkpoints are seen
only in speeds that count them, of runs that write some."""


def chosen(values: Mapping[str, Sequence[str]]) -> tuple[Knob, ...]:
    """Those of ``KNOBS`` named in ``values``, with the values given there.

    Args:
        values: name of a knob, as ``read-ahead`` -> the value that counts as off, then at least one other. Without
            values it has its own.

    Raises:
        ValueError: an unknown knob, or values that are no choice.
    """
    known = {knob.name: knob for knob in KNOBS}
    faults = [f"a sweep knows {', '.join(known)}; got {name!r}" for name in values if name not in known]
    for name, given in values.items():
        if given and (len(given) < 2 or len(set(given)) < len(given)):
            faults.append(f"{name} is varied over two values or more, each once; got {' '.join(given)}")
    if faults:
        raise ValueError("; ".join(faults))
    return tuple(
        Knob(known[name].flag, given[0], tuple(given[1:]), known[name].what) if given else known[name]
        for name, given in values.items()
    )


def fitting(knobs: Sequence[Knob], settings: StrategySettings) -> tuple[Knob, ...]:
    """Those of ``knobs`` that a run with ``settings`` takes: there are no buckets where no gradients are summed."""
    with_buckets = dataclasses.replace(settings, gradient_buckets="0")
    return tuple(knob for knob in knobs if knob.name != "gradient-buckets" or not gradient_faults(with_buckets))


def settings_of(knobs: Sequence[Knob], most: int = MOST) -> list[Setting]:
    """What is run, with nothing on first, then one knob, then more.

    Args:
        most: of settings that are all run; with more, every value alone, every two values of different knobs, and, of
            knobs with one value to be on, all of them at once.
    """
    every = [(knob.off, *knob.on) for knob in knobs]
    if all(len(knob.on) == 1 for knob in knobs) and 2 ** len(knobs) <= most:
        wanted: Iterator[tuple[str, ...]] = itertools.product(*every)
    else:
        off = tuple(knob.off for knob in knobs)
        wanted = itertools.chain([off], _alone(knobs, off), _in_pairs(knobs, off), _at_once(knobs))
    found = dict.fromkeys(tuple(zip((knob.flag for knob in knobs), values, strict=True)) for values in wanted)
    flags = [knob.flag for knob in knobs]

    def order(setting: Setting) -> tuple[int, list[int]]:
        on = [flags.index(flag) for flag, _ in on_in(knobs, setting)]
        return len(on), on

    return sorted(found, key=order)


def on_in(knobs: Sequence[Knob], setting: Setting) -> tuple[tuple[str, str], ...]:
    """Flags and values of ``setting`` that are not off."""
    return tuple(pair for knob, pair in zip(knobs, setting, strict=True) if pair[1] != knob.off)


def alone(knobs: Sequence[Knob], pair: tuple[str, str]) -> Setting:
    """The setting with nothing on but ``pair``."""
    return tuple(pair if knob.flag == pair[0] else (knob.flag, knob.off) for knob in knobs)


def _alone(knobs: Sequence[Knob], off: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for k, knob in enumerate(knobs):
        for value in knob.on:
            yield (*off[:k], value, *off[k + 1 :])


def _in_pairs(knobs: Sequence[Knob], off: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for (j, first), (k, second) in itertools.combinations(enumerate(knobs), 2):
        for one, other in itertools.product(first.on, second.on):
            yield (*off[:j], one, *off[j + 1 : k], other, *off[k + 1 :])


def _at_once(knobs: Sequence[Knob]) -> Iterator[tuple[str, ...]]:
    if knobs and all(len(knob.on) == 1 for knob in knobs):
        yield tuple(knob.on[0] for knob in knobs)
