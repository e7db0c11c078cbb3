"""One run of a traced model without memory or time: what every layer gives, computes, draws and changes.

Takes the fx graph of a model in training and the shape of a microbatch; gives ``Facts`` for every node. The run is on
fake tensors (shape, dtype and device, no data); a model that looks at data is run on real zeros instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from parallel.graph.layers import Op
from parallel.trace.op_recorder import OpRecorder, bytes_of, storage_of
from parallel.trace.without_data import Trial, swapped, trials


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of one node after the run.

    Attributes:
        output_bytes: of the tensors it gave.
        flops: of its forward pass.
        differentiable: one of the tensors it gave needs a gradient.
        random: it drew random numbers.
        changed: the nodes that made the memory it changed in place.
        saved: (number, bytes) of each storage that autograd saves for its backward pass, but parameters and buffers.
        ops: what it computed.
        output_storages: (number, bytes) of each storage that its value lies in, but parameters and buffers.
    """

    output_bytes: int
    flops: int
    differentiable: bool
    random: bool
    changed: tuple[str, ...]
    saved: tuple[tuple[int, int], ...]
    ops: tuple[Op, ...]
    output_storages: tuple[tuple[int, int], ...]


def fake_run(
    training: fx.GraphModule,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    autocast: torch.dtype | None = None,
) -> dict[str, Facts]:
    """Return the facts of every node by name. Parameters, buffers and random state of the modules stay as they are.

    Raises:
        ValueError: the model cannot run on ``shape``.
    """
    precision = torch.autocast(device.type, autocast, enabled=autocast is not None)
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), precision:
        attempts = trials(training, shape, dtype, device=device, sides=())
        try:
            return _run(training, next(attempts))
        except Exception:  # data-dependent, or an operation without a fake version: the real run tells faults apart
            return _run(training, next(attempts))


def _run(training: fx.GraphModule, trial: Trial) -> dict[str, Facts]:
    values = trial.values(training)
    recorder = OpRecorder({storage_of(tensor) for tensor in values.values()})
    interpreter = _Interpreter(training, recorder)
    with swapped(training, values), trial.mode, recorder, saved_tensors_hooks(recorder.pack, lambda tensor: tensor):
        interpreter.run(trial.example)
    return interpreter.facts


class _Interpreter(fx.Interpreter):
    def __init__(self, model: fx.GraphModule, recorder: OpRecorder) -> None:
        super().__init__(model)
        self.extra_traceback = False
        self.facts: dict[str, Facts] = {}
        self._recorder = recorder
        # Weak: the data goes when its last use is done, but its address is not given away again during this run.
        self._makers: dict[StorageWeakRef, str] = {}

    def run_node(self, n: fx.Node) -> Any:
        self._recorder.begin()
        try:
            value = super().run_node(n)
        except Exception as error:
            where = f"module {n.target!r}" if n.op == "call_module" else f"{n.op} {n.name!r}"
            raise ValueError(f"the model does not run on the example input, at {where}: {error}") from error
        changed = [self._makers[storage] for storage in self._recorder.written if storage in self._makers]
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        for tensor in tensors:
            self._makers.setdefault(storage_of(tensor), n.name)
        self.facts[n.name] = Facts(
            output_bytes=sum(map(bytes_of, tensors)),
            flops=sum(op.flops for op in self._recorder.ops),
            differentiable=any(tensor.requires_grad for tensor in tensors),
            random=self._recorder.uses_rng,
            changed=tuple(changed),
            saved=tuple(self._recorder.saved.items()),
            ops=tuple(self._recorder.ops),
            output_storages=tuple(sorted(set(filter(None, map(self._recorder.numbered, tensors))))),
        )
        return value
