"""What a checkpoint takes where parameters and the optimizer's state may be on the host, and whether it is all there.

Takes a model and where its state lies; gives seconds, bytes of the file, bytes of the device and of resident memory
that saving adds, and how many tensors of a run that goes on from the file in a fresh engine differ by any bit, after
another step, from those of the run that was never interrupted. One rank, AdamW, activations offloaded.
"""

from __future__ import annotations

import functools
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path

from app.checkpoint.file import load_checkpoint, save_checkpoint
from app.settings.optimization import OptimizerSettings
from app.settings.strategy import StrategySettings
from app.training.engines import build_engine, build_optimizer
from benchmarks.out_of_core.problem import BATCH, CLASSES
from benchmarks.out_of_core.trial import LR, loss, microbatches
from benchmarks.plan_accuracy.memory import resident, settle
from benchmarks.ranks import run_on_ranks
from models.registry import build_model
from parallel.comm.communicator import Communicator
from parallel.offload.live_bytes import LiveBytes

PLACES = {"device": "none", "optimizer on the host": "optimizer", "all on the host": "parameters"}
"""Where the state lies -> ``--offload-state``."""
PX, STEPS = 256, 2
MIB = 2**20
HEADER = (
    "model",
    "state",
    "saved in, s",
    "file, MiB",
    "device, MiB more",
    "resident, MiB more",
    "read in, s",
    "tensors",
    "different after a step",
)


def cases(model: str) -> list[dict[str, Any]]:
    return [{"model": model, "px": PX, "place": place} for place in PLACES]


def measure(case: dict[str, Any]) -> dict[str, Any]:
    (found,) = run_on_ranks(1, "benchmarks.out_of_core.checkpoint:run", case)
    return {**case, **found}


def line(row: dict[str, Any]) -> tuple[str, ...]:
    mib = [f"{row[name] / MIB:.0f}" for name in ("file_bytes", "device_bytes", "resident_bytes")]
    names = (row["model"], row["place"], f"{row['save_s']:.1f}")
    return (*names, *mib, f"{row['load_s']:.1f}", str(row["tensors"]), str(row["different"]))


def run(communicator: Communicator, case: dict[str, Any]) -> dict[str, Any]:
    """Trains, saves, trains on; reads what was saved into an engine with other weights and trains that on, too."""
    live = LiveBytes()
    with live, tempfile.TemporaryDirectory() as folder:
        engine = _engine(communicator, case, seed=0)
        for step in range(STEPS):
            engine.step(microbatches(engine, case), step, LR)
        settle()
        live.peak_bytes = live.bytes
        before, device_before, begun = resident("VmRSS"), live.bytes, time.perf_counter()
        file = Path(folder) / "last.pt"
        save_checkpoint(file, engine.state_dict())
        found = {
            "save_s": time.perf_counter() - begun,
            "file_bytes": file.stat().st_size,
            "device_bytes": live.peak_bytes - device_before,
            "resident_bytes": resident("VmHWM") - before,
        }
        again = _engine(communicator, case, seed=1)
        expected = _tensors(engine.state_dict())
        assert _different(expected, _tensors(again.state_dict())), "the fresh engine has the weights already"
        begun = time.perf_counter()
        again.load_state_dict(load_checkpoint(file))
        found["load_s"] = time.perf_counter() - begun
        for each in (engine, again):
            each.step(microbatches(each, case), STEPS, LR)
        expected = _tensors(engine.state_dict())
        return {**found, "tensors": len(expected), "different": _different(expected, _tensors(again.state_dict()))}


def _engine(communicator: Communicator, case: dict[str, Any], seed: int) -> Any:
    torch.manual_seed(seed)
    return build_engine(
        StrategySettings(
            parallel="single",
            batch=BATCH,
            microbatches=BATCH,
            offload="overlap",
            offload_state=PLACES[case["place"]],  # type: ignore[arg-type]
        ).to_strategy("cpu"),
        build_model(case["model"], classes=CLASSES).to(memory_format=torch.channels_last),
        loss,
        functools.partial(build_optimizer, OptimizerSettings(lr=LR)),
        communicator,
        batch=BATCH,
        tile=case["px"],
        seed=0,
        device=torch.device("cpu"),
    )


def _tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    """Of model and optimizer, by where they are in the state."""
    leaves, _ = tree_flatten_with_path(state)
    return {str(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}


def _different(expected: dict[str, Tensor], found: dict[str, Tensor]) -> int:
    """Tensors that are not the same to the last bit, or on one side only."""
    missing = expected.keys() ^ found.keys()
    return len(missing) + sum(not torch.equal(expected[key], found[key]) for key in expected.keys() & found.keys())
