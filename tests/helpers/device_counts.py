"""Device operations and host synchronisations of a training step, counted on the CPU: no GPU is needed.

Ranks are threads. Each strategy trains a model for two steps; the second is counted, over all ranks, and divided by the
number of microbatches. Tensors count as on the device where they come from parameters, buffers, tiles, or a factory
called with ``device=``. The CPU's branches run, so counts on a GPU differ where the code has others.

    python -m tests.helpers.device_counts [--model resnet50] [--tile 64] [--sites]

To count in another checkout, run the file by its path: ``PYTHONPATH=CHECKOUT python tests/helpers/device_counts.py``.
"""

from __future__ import annotations

import argparse
import collections
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "ddp, 2 ranks": {"name": "ddp", "ranks": 2, "depth": 1},
    "ddp, 8 ranks": {"name": "ddp", "ranks": 8, "depth": 1},
    "1f1b, 4 stages": {"name": "1f1b", "ranks": 4, "depth": 4},
    "master, 2 stages": {"name": "master", "ranks": 2, "depth": 2},
    "spatial 2x1": {"name": "spatial", "ranks": 2, "depth": 1, "grid": (2, 1)},
    "streaming, 1 rank": {"name": "single", "ranks": 1, "depth": 1, "stream": 32},
}
"""Row of the table -> fields of its strategy; ``stream``: px of a box."""
M, SEED, RATE = 8, 0, 1e-3

READS = frozenset(("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2"))
"""Operations for which the host waits: it reads a value, or the shape of the result depends on values."""
SILENT = frozenset(("detach", "alias", "lift_fresh", "empty", "empty_like", "empty_strided", "new_empty"))
"""Operations that start no kernel. Neither do views."""
TO_HOST = frozenset((Tensor.cpu, Tensor.tolist, Tensor.numpy))
LINES_OF_TRANSPORT = ("thread_comm.py", "objects.py")
"""Files whose copies between threads stand for messages."""


class Counts:
    """Operations and synchronisations of all threads that count into it.

    Args:
        on_device: tensors that are on the device.

    Attributes:
        operations: by name.
        syncs: by the line that asks for them.
    """

    def __init__(self, on_device: Iterable[Tensor] = ()) -> None:
        self.operations: collections.Counter[str] = collections.Counter()
        self.syncs: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()
        self._storages: dict[int, StorageWeakRef] = {}
        self.add(on_device)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what this thread does, backward passes of CPU tensors included."""
        with _Functions(self), _Operations(self):
            yield

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Take ``tensors`` as on the device."""
        for tensor in tensors:
            storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            self._storages[storage.cdata] = storage

    def has(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is on the device."""
        storage = self._storages.get(tensor.untyped_storage()._cdata)
        return storage is not None and not storage.expired()

    def operation(self, name: str) -> None:
        """Count an operation."""
        with self._lock:
            self.operations[name] += 1

    def sync(self, name: str) -> None:
        """Count a synchronisation, at the innermost line outside torch and this file."""
        frame = _asking()
        path = Path(frame.f_code.co_filename if frame is not None else "")
        place = f"{path.parent.name}/{path.name} {frame.f_code.co_name}: " if frame is not None else ""
        with self._lock:
            self.syncs[f"{place}{name}"] += 1


class _Functions(TorchFunctionMode):
    """Marks what factories make on the device, and counts copies to and from the host that the CPU does not make."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, counts = kwargs or {}, self._counts
        given = args[0] if args and isinstance(args[0], Tensor) else None
        if func in TO_HOST and given is not None and counts.has(given):
            counts.sync(func.__name__)
            with torch._C.DisableTorchFunction(), _disabled():
                return func(args[0].clone(), *args[1:], **kwargs)
        value = func(*args, **kwargs)
        from_list = func is Tensor.new_tensor or (func in (torch.tensor, torch.as_tensor) and kwargs.get("device"))
        if from_list:
            counts.sync(f"{func.__name__} from the host")
        if isinstance(value, Tensor) and (from_list or (given is None and kwargs.get("device") is not None)):
            counts.add([value])
        return value


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations on tensors of the device, and follows these."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        counts, name = self._counts, func.overloadpacket.__name__
        value = func(*args, **(kwargs or {}))
        asking = _asking()
        if asking is not None and asking.f_code.co_filename.endswith(LINES_OF_TRANSPORT):
            return value
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_device = [counts.has(leaf) for leaf in given]
        if not any(on_device):
            return value
        if name in READS:
            counts.sync(name)
        elif name == "copy_" and on_device[:2] == [False, True]:
            counts.sync("copy to the host")
            counts.operation(name)
            return value
        elif name == "copy_" and on_device[:2] == [True, False] and given[1].dim():
            counts.sync("copy from the host")
        if name not in SILENT and not func.is_view and name not in READS:
            counts.operation(name)
        counts.add(leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
        return value


def _asking() -> Any:
    """The innermost frame outside torch and this file."""
    frame: Any = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename == __file__ or "/torch/" in frame.f_code.co_filename):
        frame = frame.f_back
    return frame


@contextmanager
def _disabled() -> Iterator[None]:
    """Run the block without dispatch modes."""
    with torch.utils._python_dispatch._disable_current_modes():  # type: ignore[no-untyped-call]
        yield


def count(fields: Mapping[str, Any], build: Callable[[], nn.Module], px: int, m: int = M) -> Counts:
    """Return the counts of the second step of a strategy, over all its ranks.

    Args:
        build: makes the model, a classifier.
        px: side of a tile; a microbatch is one tile.
    """
    from app.training.engines import build_engine
    from models.losses import TileClassLoss
    from parallel.comm.communicator import Communicator
    from parallel.comm.thread_comm import run_on_threads
    from parallel.engine.step import Microbatch
    from parallel.memory.policy import ActivationPolicy
    from parallel.space.team import Grid
    from parallel.strategy import Strategy

    own = {key: value for key, value in fields.items() if key not in ("grid", "stream")}
    if "grid" in fields:
        own["grid"] = Grid(*fields["grid"])
    strategy = Strategy(**own, m=m, policy=ActivationPolicy(stream=fields.get("stream")))
    generator = torch.Generator().manual_seed(SEED)
    images = torch.randn(m, 3, px, px, generator=generator).contiguous(memory_format=torch.channels_last)
    counts, making = Counts(), threading.Lock()
    make_optimizer = functools.partial(torch.optim.SGD, lr=RATE, momentum=0.9, foreach=True)

    def rank(communicator: Communicator, _: None) -> None:
        with making:  # the random number generator is the process's
            torch.manual_seed(SEED)
            net = build().to(memory_format=torch.channels_last)
        engine = build_engine(
            strategy,
            net,
            TileClassLoss(),
            make_optimizer,
            communicator,
            batch=m,
            tile=px,
            seed=SEED,
            device=torch.device("cpu"),
        )
        for step in range(2):
            batch = []
            for i in engine.share:
                tiles, target = images[i : i + 1].clone(memory_format=torch.channels_last), torch.tensor([i % 2])
                wants = engine.wants(i)
                batch.append(
                    Microbatch(tiles if wants.images else None, target if wants.targets else None, (1, 3, px, px))
                )
            if not step:
                engine.step(batch, step, RATE)
                continue
            counts.add(t for each in batch for t in (each.images, each.targets) if isinstance(t, Tensor))
            counts.add(engine.on_device())
            with counts.counting():
                engine.step(batch, step, RATE)

    run_on_threads(strategy.ranks, rank, [None] * strategy.ranks, timeout_s=300)
    return counts


def table(model: str, px: int, write: Callable[[str], Any] = print, sites: bool = False) -> None:
    """Write a row per strategy, of one microbatch."""
    from models.registry import build_model

    build = functools.partial(build_model, model, classes=2)
    write(f"| {model}, {px} px, {M} microbatches | device operations | host synchronisations |")
    write("|---|---|---|")
    for name, fields in STRATEGIES.items():
        counts = count(fields, build, px)
        operations, syncs = (sum(each.values()) / M for each in (counts.operations, counts.syncs))
        write(f"| {name} | {operations:,.0f} | {syncs:,.1f} |")
        for what, number in counts.syncs.most_common() if sites else ():
            write(f"|   {what} | | {number / M:.1f} |")
        for what, number in counts.operations.most_common() if sites else ():
            write(f"|   {what} | {number / M:.1f} | |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="resnet50", help="name of a model of models/ (default: resnet50)")
    parser.add_argument("--tile", type=int, default=64, help="px, side of a tile (default: 64)")
    parser.add_argument(
        "--sites", action="store_true", help="also write where the host waits, and the commonest operations"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    table(given.model, given.tile, sites=given.sites)


if __name__ == "__main__":
    main()
