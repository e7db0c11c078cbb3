"""A folder as ``app.bench`` leaves it, with figures made up by a formula."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

GIB = 1 << 30
MODELS = {"resnet50": 2.0, "unet & <friends>": 0.6}
"""Images/s of one rank at 512 px. The second name would break a page that does not escape it."""

STRATEGIES = ("ddp", "ddp + recompute", "fsdp", "gpipe", "1f1b", "master", "master + recompute", "bidirectional")


REFUSED = "bidirectional needs an even number of stages; got --stages 1: use --ranks 2 or more"


def write_bench(
    folder: Path, *, tiles: tuple[int, ...] = (512, 1024, 2048), ranks: tuple[int, ...] = (1, 2, 4)
) -> Path:
    """A finished benchmark: some rows out of memory, some that cannot run."""
    rows = []
    for model, tile, n in itertools.product(MODELS, tiles, ranks):
        work = {"model": model, "tile_px": tile, "ranks": n, "scaling": "strong"}
        if n == 1:
            rows += [row("single", **work), _ended(row("bidirectional", **work), "cannot", REFUSED)]
        for k, strategy in enumerate(STRATEGIES if n > 1 else ()):
            if tile > 1024 and strategy in ("ddp", "fsdp"):
                rows.append(unfit(strategy, **work))
                continue
            times = 1 - 0.05 * k
            speed = MODELS[model] * (512 / tile) ** 2 * n**0.9 * times
            found = row(strategy, **work, images_per_second=speed, pixels_per_second=speed * tile**2)
            found |= {"images_per_second_range": [0.97 * speed, 1.02 * speed], "device_bytes": [GIB] * n}
            found |= {"bubble": 0.12, "bubble_predicted": 0.111} if k > 2 else {}
            found |= {"baseline": "ddp", "loss_matches": True, "times_baseline": times} if k else {}
            rows.append(found | {"claim": f"{times:.2f}x ddp on {n} ranks, ranges overlap"})
    return write_rows(folder, rows)


def write_rows(folder: Path, rows: list[dict[str, Any]], **changed: Any) -> Path:
    """``bench.json`` with these rows."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {
        "command": "python -m app.bench --slides demo-data/slides --tiles 512 1024 2048 --ranks 1 2 4 --memory 3GiB",
        "created": "2026-11-20T14:05:33+00:00",
        "wall_s": 7384.2,
        "environment": {
            "megatile": {"version": "0.1.0", "commit": "0123abc", "changed": False},
            "python": "3.11.7",
            "cpu": {"model": "A processor of 2 cores", "cores": 2, "cores_of_machine": 2},
            "memory_bytes": 24 * GIB,
            "gpus": [],
        },
        "settings": {"slides": "demo-data/slides", "tiles": [512, 1024, 2048], "ranks": [1, 2, 4], "batch": 8}
        | {"microbatches": 8, "repeats": 3, "steps": 5, "memory": "3GiB", "labels": None, "out": "runs/bench"},
        "rows": rows,
    }
    (folder / "bench.json").write_text(json.dumps({**found, **changed}))
    return folder


def row(strategy: str = "ddp", **changed: Any) -> dict[str, Any]:
    """A row that ran, on two ranks and tiles of 512 px."""
    known = {
        "model": "resnet50",
        "strategy": strategy,
        "ranks": 2,
        "tile_px": 512,
        "global_batch": 8,
        "microbatches": 4,
        "scaling": None,
        "status": "ok",
        "reason": "",
        "images_per_second": 2.0,
        "images_per_second_range": [1.9, 2.1],
        "images_per_second_repeats": [1.9, 2.0, 2.1],
        "images_per_second_no_data": 2.02,
        "pixels_per_second": 524288.0,
        "data_wait_fraction": 0.01,
        "bubble": None,
        "bubble_predicted": None,
        "bytes_sent": [100 << 20, 100 << 20],
        "peak_memory_bytes": [2 * GIB, 2 * GIB],
        "device_bytes": [GIB, GIB],
        "time": {"compute": 3.9, "transfer": None, "bubble": None, "data": 0.04},
        "losses": [0.693147],
        "loss_matches": None,
        "baseline": None,
        "times_baseline": None,
        "claim": "2 images/s: the baseline",
        "schedule_svg": None,
        "wall_s": 60.0,
    }
    return {**known, **changed}


def unfit(strategy: str = "ddp", **changed: Any) -> dict[str, Any]:
    """A row that ran out of memory: nothing was measured."""
    reason = (
        "rank 0: out of memory on cpu within --memory 3 GiB: lower --tile, raise --microbatches, or use --recompute"
    )
    return _ended(row(strategy, **changed), "out-of-memory", reason)


def _ended(found: dict[str, Any], status: str, reason: str) -> dict[str, Any]:
    unknown = {key: None for key in found if key.startswith(("images", "pixels", "bubble", "bytes", "peak", "device"))}
    return {
        **found,
        **unknown,
        "status": status,
        "reason": reason,
        "time": None,
        "losses": [],
        "claim": "out of memory",
    }
