"""A folder as ``app.bench`` leaves it, with figures made up by a formula."""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GIB = 1 << 30
LIMIT_GIB = 3
MODELS = {"resnet50": (2.0, 0.9), "unet & <friends>": (0.6, 2.2)}
"""Images/s of one rank at 512 px, GiB of such a tile. The second name would break a page that does not escape it."""

SPLIT = {
    "gpipe": 0.80,
    "1f1b": 0.97,
    "master": 0.9,
    "master + recompute": 0.7,
    "bidirectional": 1.06,
}
"""Strategy -> speed beside ddp."""

STRATEGIES = ("single", "ddp", "ddp + recompute", "fsdp", *SPLIT)
REFUSED = "bidirectional needs an even number of stages; got --stages 1: use --ranks 2 or more"


def write_bench(
    folder: Path, *, tiles: tuple[int, ...] = (512, 1024, 2048), ranks: tuple[int, ...] = (1, 2, 4)
) -> Path:
    """A finished benchmark: some rows out of memory, some that cannot run."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        _row(model, strategy, n, tile)
        for model, tile, n in itertools.product(MODELS, tiles, ranks)
        for strategy in STRATEGIES
        if strategy in (("single", "bidirectional") if n == 1 else STRATEGIES[1:])
    ]
    for row in rows:
        _compare(row, rows)
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
        | {"microbatches": 8, "repeats": 3, "steps": 5, "memory": f"{LIMIT_GIB}GiB", "labels": None},
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


def _row(model: str, strategy: str, ranks: int, tile: int) -> dict[str, Any]:
    alone, tile_gib = MODELS[model]
    base = strategy.split(" ")[0]
    times = {"ddp + recompute": 0.74, "fsdp": 0.93}.get(strategy, SPLIT.get(strategy, 1.0))
    jitter = 0.97 + 0.06 * (zlib.crc32(f"{model}{strategy}{ranks}{tile}".encode()) % 100) / 100
    speed = alone * (512 / tile) ** 2 * ranks**0.9 * times * jitter
    kept = tile_gib * (tile / 512) ** 2 * (0.2 if "recompute" in strategy else 1.0) / (ranks if base in SPLIT else 1)
    counted = [int((kept * (1 - 0.3 * rank / ranks) + 0.3) * GIB) for rank in range(ranks)]
    found = row(
        strategy,
        model=model,
        ranks=ranks,
        tile_px=tile,
        scaling="strong",
        images_per_second=speed,
        images_per_second_range=[speed * 0.97, speed * 1.02],
        images_per_second_repeats=[speed * 0.97, speed, speed * 1.02],
        images_per_second_no_data=speed * 1.01,
        pixels_per_second=speed * tile**2,
        peak_memory_bytes=[size + GIB // 2 for size in counted],
        device_bytes=counted,
        bytes_sent=[90 << 20] * ranks if ranks > 1 else [0],
        time={"compute": 7.8 / speed, "transfer": None, "bubble": None, "data": 0.1 / speed},
    )
    if ranks == 1 and base in SPLIT:
        return _ended(found, "cannot", REFUSED)
    if max(counted) > LIMIT_GIB * GIB:
        return _ended(found, "out-of-memory", unfit()["reason"])
    if base in SPLIT:
        found |= {"bubble": 0.12, "bubble_predicted": 0.111}
        found["time"] = {"compute": 6.2 / speed, "transfer": 0.6 / speed, "bubble": 1.0 / speed, "data": 0.1 / speed}
    return found


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


def _alike(row: dict[str, Any], rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    keys = ("model", "tile_px", "ranks")
    yield from (other for other in rows if all(other[key] == row[key] for key in keys))


def _compare(row: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    name = "ddp" if row["ranks"] > 1 else "single"
    base = next((other for other in _alike(row, rows) if other["strategy"] == name), None)
    if base is None or base is row or row["status"] != "ok":
        return
    row |= {"baseline": name, "loss_matches": True}
    if base["status"] == "ok":
        row["times_baseline"] = row["images_per_second"] / base["images_per_second"]
        row["claim"] = f"{row['times_baseline']:.2f}x {name} on {row['ranks']} ranks, ranges overlap"
    else:
        row["claim"] = f"{row['images_per_second']:.3g} images/s where {name} is out of memory"
