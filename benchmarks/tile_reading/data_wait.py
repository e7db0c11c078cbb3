"""Measure how long training waits for tiles: steps fed from slides, and the same steps fed from memory.

Takes nothing (slides are made); gives images/s of both, alternating in one run, and the share of waiting.

    python -m benchmarks.tile_reading.data_wait [--steps 12] [--model resnet18] [--tile 1024] [--side 8192]
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from app import synth
from app.launch.place import place
from app.launch.watchdog import Watchdog
from app.settings.optimization import ModelSettings, ScoreSettings
from app.settings.run import DataSettings, RunConfig, SplitSettings
from app.settings.strategy import StrategySettings
from app.training.batches import microbatches_of
from app.training.dataset import prepare
from app.training.run_folder import RunFolder
from app.training.session import Session
from benchmarks.results import OUT, measured_on, parser_of, write_json
from pipelines.catalog.table import FailedSlides
from pipelines.tiles.tiling import IndexSettings

WARM_UP = 2


def measure(model: str, tile: int, batch: int, steps: int, side: int) -> dict[str, Any]:
    """Times of ``steps`` steps of each kind, on slides of ``side`` px."""
    slides = OUT / "data_wait"
    synth.main([str(slides), "--slides", "4", "--size", str(side), "--task", "classify"])
    config = RunConfig(
        DataSettings(slides),
        index=IndexSettings(tile=tile),
        split=SplitSettings(validation=0.0),
        net=ModelSettings(model=model),
        strategy=StrategySettings(batch=batch, microbatches=batch),
        score=ScoreSettings(),
    )
    folder = RunFolder(Path(tempfile.mkdtemp()))
    session = Session(
        config,
        config.strategy.to_strategy("cpu"),
        prepare(config, folder, print),
        place(config.strategy),
        FailedSlides(folder.failed_slides),
        Watchdog(0, stuck_s=config.strategy.timeout_s),
    )
    fed_s, wait_s, memory_s = [], [], []
    with iter(session.stream) as tiles, session.feed(tiles, tiles.ready) as batches:
        for step in range(steps + WARM_UP):
            begun_s = time.perf_counter()
            part = next(batches)
            wait_s.append(time.perf_counter() - begun_s)
            session.engine.step(microbatches_of(batches, part, session.reading.sizes), step, 1e-4)
            fed_s.append(time.perf_counter() - begun_s)
            session.engine.step(microbatches_of(batches, part, session.reading.sizes), step, 1e-4)
            memory_s.append(time.perf_counter() - begun_s - fed_s[-1])
            part.release()
            print(f"step {step}: fed {fed_s[-1]:.2f} s, from memory {memory_s[-1]:.2f} s, waited {wait_s[-1]:.4f} s")
    fed_s, wait_s, memory_s = fed_s[WARM_UP:], wait_s[WARM_UP:], memory_s[WARM_UP:]
    return {
        "model": model,
        "tile_px": tile,
        "images_per_second": batch / statistics.median(fed_s),
        "images_per_second_no_data": batch / statistics.median(memory_s),
        "ratio": statistics.median(m / f for m, f in zip(memory_s, fed_s, strict=True)),
        "data_wait_fraction": sum(wait_s) / sum(fed_s),
        "steps": steps,
        "environment": measured_on(),
    }


def main() -> None:
    parser = parser_of(__doc__, writes=False)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--tile", type=int, default=1024, help="px")
    parser.add_argument("--batch", type=int, default=2, help="tiles of a step")
    parser.add_argument("--steps", type=int, default=12, help="steps of each kind")
    parser.add_argument("--side", type=int, default=8192, help="px of the slides that are made")
    arguments = parser.parse_args()
    result = measure(arguments.model, arguments.tile, arguments.batch, arguments.steps, arguments.side)
    write_json("data_wait", result)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
