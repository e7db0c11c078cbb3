"""What the engine and the checkpoint cost: the engine's step beside the plain loop's, and the stall of a save.

Takes nothing; gives the median ratio of alternating steps, and a save's share of a hundred steps.

    python -m benchmarks.schedules.engine [--model resnet18] [--tile 256] [--steps 12]
"""

from __future__ import annotations

import copy
import functools
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from app.checkpoint.file import save_checkpoint
from app.training.outcome import Stopwatch
from benchmarks.machine import measured_on
from benchmarks.results import OUT, parser_of, write_json
from benchmarks.whole_engine import whole_engine
from models.registry import build_model
from parallel.comm.local import LocalCommunicator
from parallel.engine.step import Microbatch

STEPS_PER_SAVE = 100  # the default of --checkpoint-every
BATCH, M, WARM_UP, SAVES = 8, 4, 2, 3


def measure(name: str, tile: int, steps: int) -> dict[str, Any]:
    """Seconds of ``steps`` steps of each kind, in turn, on the same tiles."""
    plain = build_model(name, classes=2).to(memory_format=torch.channels_last)
    ours = copy.deepcopy(plain)
    make_rule = functools.partial(torch.optim.AdamW, lr=1e-4)
    plain_rule, shape = make_rule(plain.named_parameters()), (BATCH // M, 3, tile, tile)
    engine = whole_engine(ours, F.cross_entropy, make_rule, LocalCommunicator(), batch=BATCH, m=M, shape=shape)
    images = torch.randn(BATCH, 3, tile, tile).to(memory_format=torch.channels_last)
    labels = torch.arange(BATCH) % 2
    parts = list(zip(images.split(BATCH // M), labels.split(BATCH // M), strict=True))
    microbatches = [Microbatch(part, label, tuple(part.shape)) for part, label in parts]

    def plain_step() -> None:
        plain.train()
        plain_rule.zero_grad(set_to_none=True)
        for part, label in parts:
            (F.cross_entropy(plain(part), label) / M).backward()
        plain_rule.step()

    plain_s, ours_s = [], []
    for step in range(steps + WARM_UP):
        watch = Stopwatch()
        plain_step()
        plain_s.append(watch.lap())
        engine.step(microbatches, step, 1e-4)
        ours_s.append(watch.lap())
    saves_s = []
    with tempfile.TemporaryDirectory(dir=OUT) as folder:
        for _ in range(SAVES):
            watch = Stopwatch()
            save_checkpoint(Path(folder) / "last.pt", engine.state_dict())
            saves_s.append(watch.lap())
    step_s = statistics.median(ours_s[WARM_UP:])
    return {
        "model": name,
        "tile_px": tile,
        "engine_over_plain": statistics.median(p / o for p, o in zip(plain_s[WARM_UP:], ours_s[WARM_UP:], strict=True)),
        "step_s": step_s,
        "save_s": statistics.median(saves_s),
        "checkpoint_stall": statistics.median(saves_s) / (STEPS_PER_SAVE * step_s),
        "environment": measured_on(),
    }


def main() -> None:
    parser = parser_of(__doc__, writes=False)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--tile", type=int, default=256, help="px")
    parser.add_argument("--steps", type=int, default=12, help="steps of each kind")
    arguments = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    result = measure(arguments.model, arguments.tile, arguments.steps)
    write_json("engine", result)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
