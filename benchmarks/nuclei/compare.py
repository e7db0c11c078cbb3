"""Dice of held-out nuclei over one setting of ``app.train``, in five folds, each with a seed of its own.

``microbatch``: tiles that batch norm averages over, at the same batch, learning rate, steps and tiles seen. The table
has the planned bytes of each size under data parallelism and MASTER. ``tile``: side of the tiles in training and
prediction, at the same steps and px of each step. ``bench-data`` keeps what was measured before.

    python -m benchmarks.nuclei.compare microbatch|tile [--steps N] [--folds N] [--write]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.kept_runs import measured, planned_bytes
from benchmarks.nuclei.run import FOLDS, MODEL, NUCLEI, OUT, by_megatile, folds_of, interval
from benchmarks.results import markdown_table, parser_of, publish, results
from parallel.memory.policy import KEEP_ALL, ActivationPolicy
from parallel.strategy import Strategy
from parallel.units import bytes_text

TILE, BATCH, MEMORY = 128, 16, 112 << 20
"""Of ``microbatch``: px, tiles of a step, bytes of each rank."""
WAYS = {
    f"{name}, {ranks} ranks{' +recompute' * policy.saves}": (name, ranks, depth, policy)
    for name, ranks, depth in (("ddp", 2, 1), ("master", 4, 4))
    for policy in (KEEP_ALL, ActivationPolicy("block"))
}
"""A rank of ddp holds as much on any number of ranks."""


@dataclass(frozen=True)
class Study:
    """Values of one setting.

    Attributes:
        settings: value -> arguments of ``app.train``.
        base: value that the others are compared with.
    """

    settings: dict[int, tuple[str, ...]]
    base: int
    steps: int


def _microbatches(tiles: int) -> tuple[str, ...]:
    return ("--tile", str(TILE), "--batch", str(BATCH), "--microbatches", str(BATCH // tiles))


def _tiles(px: int) -> tuple[str, ...]:
    return ("--tile", str(px), "--batch", str(4 * (256 // px) ** 2))


STUDIES = {
    "microbatch": Study({tiles: _microbatches(tiles) for tiles in (1, 2, 4, 8)}, base=4, steps=50),
    "tile": Study({px: _tiles(px) for px in (64, 128, 256)}, base=64, steps=80),
}


def bytes_of(way: str, tiles: int) -> str:
    """Return the planned bytes of the fullest rank, and whether they exceed ``MEMORY``."""
    name, ranks, depth, policy = WAYS[way]
    size = planned_bytes(MODEL, TILE, BATCH, Strategy(name, ranks, depth, BATCH // tiles, policy=policy))
    return bytes_text(size) + ", too much" * (size > MEMORY)


def table(name: str, dice: Mapping[int, Mapping[str, float]], folds: list[list[str]]) -> str:
    """Return a row for each value: mean Dice of all images, of each fold, and paired differences from the base."""
    base, ways = STUDIES[name].base, WAYS if name == "microbatch" else ()
    lines = []
    for value, of_image in dice.items():
        differences = [of_image[image] - dice[base][image] for image in of_image]
        low, high = interval(differences)
        of_folds = ", ".join(f"{np.mean([of_image[image] for image in held]):.3f}" for held in folds)
        gain = "" if value == base else f"{np.mean(differences):+.3f} ({low:+.3f} to {high:+.3f})"
        mean = f"{np.mean(list(of_image.values())):.3f}"
        lines.append((str(value), mean, of_folds, gain, *(bytes_of(way, value) for way in ways)))
    return markdown_table((name, "Dice", "of each fold", f"over {base}, 95 % interval", *ways), lines)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument(
        "--steps", type=int, help=", ".join(f"{name}: {study.steps}" for name, study in STUDIES.items())
    )
    parser.add_argument("--folds", type=int, default=FOLDS, help="of five, the first ones")
    asked = parser.parse_args()
    study, images, masks = STUDIES[asked.study], NUCLEI / "images", NUCLEI / "masks"
    steps = asked.steps or study.steps
    names = [path.stem for path in images.glob("*.png")]
    folds = folds_of(names)[: asked.folds]
    runs = [(value, fold) for fold in range(len(folds)) for value in study.settings]
    cases = {}
    for value, fold in runs:
        own = (*study.settings[value], "--steps", str(steps), "--seed", str(fold))
        out = OUT / f"{asked.study}{value}_fold{fold}"
        case = partial(by_megatile, out, folds[fold], images, masks, names, *own)
        cases[f"{value} fold{fold} steps{steps}"] = case
    dice: dict[int, dict[str, float]] = {value: {} for value in study.settings}
    for (value, _), row in zip(runs, measured(f"nuclei_{asked.study}", cases), strict=True):
        dice[value] |= row["dice"]
    about = f"{steps} steps. {bytes_text(MEMORY)} a rank.\n" if asked.study == "microbatch" else f"{steps} steps.\n"
    publish(__file__, results(about, table(asked.study, dice, folds)), asked.write, asked.study)


if __name__ == "__main__":
    main()
