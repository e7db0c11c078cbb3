"""Calibration: a model of what layers cost on a device, from some seconds of timed operations; stored.

Ranks of a machine share its memory and its caches: the same number of processes are timed together. Each is this module
as a program, which prints a JSON line for every reading; what ends it after the first round of all kinds loses none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import torch

from parallel.cost.calibrated import PASSES, CostModel, Curve, OpWork, PassModel, fit, work_of_shape
from parallel.cost.roofline import ROUND, Product, backward_bytes, forward_bytes, products
from parallel.graph.layers import Convolution
from parallel.profile.cache import CoreUse, cpu_model, keep_freed_memory, load_or_measure
from parallel.profile.gpu import gpu_at, last_error, set_tf32
from parallel.profile.op_timing import MOVING, Setting, time_convolution, time_moving, time_product

QUICK_S = 45.0
"""Budget where a plan waits for it."""

FORMAT = {"cpu": 6, "cuda": 6}
"""By kind of device; raised when models kept by earlier versions no longer hold."""

BEST = 0.1
"""Quantile of seconds per flop, and per byte, that counts as the device's best."""

LEAST_S = 1e-9
ROOT = Path(__file__).parents[2]

MIB = 2**20
MOVED_BYTES = (16 * 1024, MIB, 6 * MIB, 32 * MIB)
"""Of the images that operations other than products are timed on."""
CHANNELS = 64
SHARE_OF_MOVING = 0.35
"""Of the budget, at most; the rest is for products."""


@dataclass(frozen=True)
class DeviceUse:
    """Device and how ranks use it.

    Attributes:
        threads: of each rank, on a CPU.
        together: ranks that compute at the same time on this machine, if it is a CPU; on an accelerator 1.
        dtype: of the products; half types are mixed precision, for graphs traced in float32.
        channels_last: memory layout of images.
        tf32: float32 is multiplied in TF32, on a GPU.
    """

    device: torch.device
    threads: int = 1
    together: int = 1
    dtype: torch.dtype = torch.float32
    channels_last: bool = True
    tf32: bool = False

    def key(self) -> dict[str, Any]:
        """Return all that a calibration holds for."""
        cuda = self.device.type == "cuda"
        return {
            "format": FORMAT[self.device.type],
            "device": gpu_at(self.device.index or 0).name if cuda else cpu_model(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "torch": torch.__version__,
            "threads": self.threads,
            "together": self.together,
            "dtype": str(self.dtype),
            "channels_last": self.channels_last,
        } | ({"tf32": self.tf32} if cuda else {})


def load_or_calibrate(use: DeviceUse, seconds: float = QUICK_S) -> CostModel:
    """Return the model kept of an earlier calibration as long as this one, else a new one, which is kept."""

    def parse(text: str) -> CostModel | None:
        model = CostModel.from_json(text)
        return model if model.seconds_taken >= seconds else None

    return load_or_measure(
        use.key(), "costs", "operations", lambda: calibrate(use, seconds), parse, lambda model: model.to_json()
    )


def calibrate(use: DeviceUse, seconds: float = QUICK_S) -> CostModel:
    """Time operations on a device and return the model that fits them.

    Args:
        seconds: budget of the timing; starting the processes comes on top.

    Raises:
        RuntimeError: a process did not end, or could not time enough; says what it printed last.
    """
    settings = {
        "device": str(use.device),
        "threads": use.threads,
        "dtype": str(use.dtype).removeprefix("torch."),
        "channels_last": use.channels_last,
        "tf32": use.tf32,
        "seconds": seconds,
    }
    cores = CoreUse()
    readings = _run([settings | {"seed": seed} for seed in range(use.together)], seconds)
    others = cores.others() if use.device.type == "cpu" else 0.0
    return dataclasses.replace(fit_model(readings, use.key(), seconds), others=others)


def fit_model(readings: Iterable[dict[str, Any]], key: dict[str, Any], seconds: float) -> CostModel:
    """Return the model that explains ``readings``, as ``readings_of`` gives them; ``key`` as ``DeviceUse.key``."""
    products: dict[str, list[tuple[OpWork, dict[str, float]]]] = defaultdict(list)
    curves: dict[str, dict[str, list[list[float]]]] = {"forward": defaultdict(list), "backward": defaultdict(list)}
    for reading in readings:
        if reading["what"] == "moving":
            for side, points in curves.items():
                if reading[side][0] and reading[side][1]:
                    points[reading["name"]].append(reading[side])
        else:
            shape = _shape(reading)
            seconds_of = {name: reading["reading"][f"{name}_s"] for name in PASSES}
            work = work_of_shape(shape)
            products[work.kind].append((work, seconds_of))
    models: dict[str, dict[str, PassModel]] = {}
    errors: list[float] = []
    for kind, rows in products.items():
        models[kind] = {}
        for name in PASSES:
            models[kind][name], left_out = _pass_model([work for work, _ in rows], [taken[name] for _, taken in rows])
            errors += left_out
    return CostModel(
        key,
        models,
        {name: _curve(points) for name, points in curves["forward"].items()},
        {name: _curve(points) for name, points in curves["backward"].items()},
        float(np.median(errors)),
        seconds,
    )


def _run(settings: Sequence[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """Return the readings of one process for each of ``settings``, all at work at the same time."""
    device = torch.device(settings[0]["device"])
    # A process that has a CUDA context makes them itself: its GPU may admit no other (``gpu``).
    if device.type == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        with torch.random.fork_rng([device]):
            found = [reading for own in settings for reading in readings_of(own)]
        torch.cuda.empty_cache()
        return found
    found = []
    timeout_s = 4 * seconds + 300
    with contextlib.ExitStack() as open_processes:
        # All at once: a process whose full pipe nobody reads would stand still while the others are timed.
        readers = open_processes.enter_context(ThreadPoolExecutor(len(settings)))
        workers: list[subprocess.Popen[str]] = []
        for own in settings:
            command = [sys.executable, "-m", "parallel.profile.calibrate", json.dumps(own)]
            worker = subprocess.Popen(command, cwd=ROOT, text=True, stdin=PIPE, stdout=PIPE, stderr=PIPE)
            open_processes.callback(worker.kill)
            workers.append(worker)
        for worker in workers:
            assert worker.stdout is not None
            worker.stdout.readline()  # "ready"
        for worker in workers:
            assert worker.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended already; what it says comes below
                worker.stdin.write("go\n")
                worker.stdin.flush()
        try:
            outputs = list(readers.map(lambda worker: worker.communicate(timeout=timeout_s), workers))
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"a calibration of {device} did not end within {timeout_s:.0f} s") from None
        for worker, (out, err) in zip(workers, outputs, strict=True):
            of_worker = [json.loads(line) for line in out.splitlines() if line.endswith("}")]
            timed = sum(reading["what"] in ("convolution", "product") for reading in of_worker)
            if timed < sum(ROUND.values()):  # a round has every kind
                last = last_error(err) or f"nothing; exit code {worker.returncode}"
                raise RuntimeError(f"a calibration has to time operations on {device}, and its process said: {last}")
            found += of_worker
    return found


def readings_of(settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield all that a model is fitted to, for settings as ``calibrate`` makes them; one at least of every kind."""
    set_tf32(settings["tf32"])
    setting = Setting(torch.device(settings["device"]), getattr(torch, settings["dtype"]), settings["channels_last"])
    seconds = settings["seconds"]
    begin = time.perf_counter()
    left: Callable[[float], bool] = lambda share: time.perf_counter() - begin < share * seconds  # noqa: E731
    keep_freed_memory()  # as ranks do when they are placed
    for number, size in enumerate(MOVED_BYTES):
        side = math.isqrt(size // 4 // CHANNELS)
        images = setting.tensor(1, CHANNELS, side, side)
        for name in MOVING:
            if number > 1 and not left(SHARE_OF_MOVING):
                break
            op, reading = time_moving(name, images, setting)
            entry = {"what": "moving", "name": name, "forward": [forward_bytes(op), reading.forward_s]}
            yield entry | {"backward": [backward_bytes(op), reading.input_s]}
    for number, (_, shape) in enumerate(products(settings["seed"])):
        if number >= sum(ROUND.values()) and not left(1.0):
            return
        if isinstance(shape, Product):
            yield {"what": "product", "shape": asdict(shape), "reading": asdict(time_product(shape, setting))}
        else:
            yield {"what": "convolution", "shape": asdict(shape), "reading": asdict(time_convolution(shape, setting))}


def _pass_model(works: Sequence[OpWork], seconds: Sequence[float]) -> tuple[PassModel, list[float]]:
    taken = np.maximum(np.asarray(seconds), LEAST_S)
    flops, moved = (np.array([getattr(work, name) for work in works]) for name in ("flops", "bytes"))
    flop_s, byte_s = (float(np.quantile(taken / amount, BEST)) for amount in (flops, moved))
    ratio, errors = fit([work.features for work in works], taken / (flops * flop_s + moved * byte_s))
    return PassModel(flop_s, byte_s, ratio), errors


def _curve(points: Sequence[Sequence[float]]) -> Curve:
    """Return the means of what was read for the same number of bytes."""
    by_bytes: dict[float, list[float]] = defaultdict(list)
    for moved, seconds in points:
        by_bytes[moved].append(max(seconds, LEAST_S))
    ascending = sorted(by_bytes)
    return Curve(tuple(ascending), tuple(float(np.mean(by_bytes[moved])) for moved in ascending))


def _shape(reading: dict[str, Any]) -> Convolution | Product:
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in reading["shape"].items()
    }
    return Product(**fields) if reading["what"] == "product" else Convolution(**fields)


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
