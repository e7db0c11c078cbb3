"""The published study of CPU offload: each network in each mode, training time over that without offload.

Takes nothing; gives a row per network and mode. ``benchmarks.offload_study`` measures, here with few made pictures and
few epochs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from benchmarks.gpu.setting import Row, Setting, attempt
from benchmarks.offload_study import run as study
from benchmarks.offload_study.pictures import made_pictures
from benchmarks.offload_study.published import SECONDS

HEADER = (
    "model",
    "mode",
    "epochs",
    "training, s",
    "over none",
    "published",
    "accuracy",
    "out: mean, GB/s",
    "back",
    "of",
)


def rows(setting: Setting) -> Iterator[Row]:
    models = setting.of(tuple(SECONDS), ("squeezenet1_1",))
    for number, model in enumerate(models):
        share = setting.left_s / (len(models) - number)

        def run(model: str = model, share: float = share) -> Row:
            result = study.study(
                [model],
                setting.of(study.MODES, ("none", "naive", "overlap")),
                functools.partial(made_pictures, most=setting.of(160, 10)),
                epochs=setting.of(4, 1),
                batch=setting.of(32, 4),
                px=setting.of(224, 64),
                device=setting.device,
                seconds=share,
            )
            return {"rows": [{**row, "source": result["source"]} for row in result["rows"]]}

        found = attempt({"model": model}, run)
        yield from found.get("rows", [found])


def line(row: Row) -> tuple[str, ...]:
    rates = [row["copies"].get(way, {}).get("mean_bytes_per_s") for way in ("out", "back")]
    return (
        row["model"],
        row["mode"],
        str(row["epochs"]),
        f"{row['training_s']:.2f}",
        "-" if row["ratio"] is None else f"{row['ratio']:.2f}",
        "-" if row["published_ratio"] is None else f"{row['published_ratio']:.2f}",
        f"{row['best_accuracy']:.2f}",
        *("-" if rate is None else f"{rate / 1e9:.1f}" for rate in rates),
        row["source"],
    )
