"""One process of a calibration: times operations until its budget is spent.

Started by ``calibrate`` with its settings as JSON; says ``ready``, waits for a line, so that processes that share a
machine begin together, and prints a JSON line for every reading, so that whatever ends it early, what it has read is
kept.

    python -m parallel.profile.calibrate_worker '{"device": "cpu", "threads": 1, ...}'
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch

from parallel.cost.roofline import backward_bytes, forward_bytes
from parallel.cost.shapes import ROUND, Product, products
from parallel.profile.gpu import set_tf32
from parallel.profile.malloc import keep_freed_memory
from parallel.profile.op_timing import MOVING, Setting, time_convolution, time_fresh, time_moving, time_product

MIB = 2**20
FRESH_BYTES = (4 * MIB, 24 * MIB, 40 * MIB, 160 * MIB)
"""glibc asks the kernel for blocks of 32 MiB and more, at the latest."""
LARGEST_OF_HEAP = 32 * MIB - 8192
MOVED_BYTES = (16 * 1024, MIB, 6 * MIB, 32 * MIB)
"""Of the images that operations other than products are timed on."""
CHANNELS = 64
SHARE_OF_MOVING = 0.35
"""Of the budget, at most; the rest is for products."""


def readings(setting: Setting, seconds: float, seed: int, heap_kept: bool) -> Iterator[dict[str, Any]]:
    """Yield everything a model is fitted to, one reading at a time; at least one of every kind of product.

    Args:
        setting: where and how operations are timed.
        seconds: budget.
        seed: of the shapes of products.
        heap_kept: the ranks call ``keep_freed_memory``.
    """
    begin = time.perf_counter()
    left: Callable[[float], bool] = lambda share: time.perf_counter() - begin < share * seconds  # noqa: E731
    if heap_kept:
        keep_freed_memory()
    torch.empty(LARGEST_OF_HEAP, dtype=torch.uint8).fill_(1)  # glibc learns from it, as from any training step
    for size in FRESH_BYTES:
        yield {"what": "fresh", "bytes": size, "seconds": time_fresh(size, setting)}
    keep_freed_memory()  # what new memory costs is known, and may not blur what follows
    for number, size in enumerate(MOVED_BYTES):
        side = math.isqrt(size // 4 // CHANNELS)
        images = setting.tensor(1, CHANNELS, side, side)
        for name in MOVING:
            if number > 1 and not left(SHARE_OF_MOVING):
                break
            op, reading = time_moving(name, images, setting)
            entry = {"what": "moving", "name": name, "forward": [forward_bytes(op), reading.forward_s]}
            yield entry | {"backward": [backward_bytes(op), reading.input_s]}
    for number, (_, shape) in enumerate(products(seed)):
        if number >= sum(ROUND.values()) and not left(1.0):
            return
        if isinstance(shape, Product):
            yield {"what": "product", "shape": asdict(shape), "reading": asdict(time_product(shape, setting))}
        else:
            yield {"what": "convolution", "shape": asdict(shape), "reading": asdict(time_convolution(shape, setting))}


def readings_of(settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield ``readings`` for ``settings``, as ``calibrate`` makes them."""
    set_tf32(settings["tf32"])
    setting = Setting(torch.device(settings["device"]), getattr(torch, settings["dtype"]), settings["channels_last"])
    yield from readings(setting, settings["seconds"], settings["seed"], settings["heap_kept"])


def main() -> None:
    """Print readings for the settings on the command line, once a line on stdin says so."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(settings["threads"])
    torch.zeros(1, device=settings["device"])  # starts the accelerator
    print("ready", flush=True)
    sys.stdin.readline()
    for reading in readings_of(settings):
        print(json.dumps(reading), flush=True)


if __name__ == "__main__":
    main()
