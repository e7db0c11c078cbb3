"""Errors of peers on the operations of the table of teams, as those of teams are taken.

Takes the name of a peer, an operation and the sides of a tile; gives the largest errors. DTensor runs on two processes
over Gloo.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

from benchmarks.exactness.peers import DETACHED, ONCE, by_detached_halos, by_halos_padded_once
from benchmarks.exactness.spatial_ops import OPERATIONS, Network
from benchmarks.exactness.team_error import relative_errors
from parallel.comm.communicator import Communicator
from parallel.space.team import Grid

WAYS = {DETACHED: by_detached_halos, ONCE: by_halos_padded_once}
TILES = 2


def peer_error(peer: str, operation: str, sides: tuple[int, int], grid: Grid) -> dict[str, float]:
    """Return kind -> largest relative error of MPI4DL's ways.

    Raises:
        ValueError: the peer refuses.
    """
    trial = _Trial(operation, sides)
    ours = copy.deepcopy(trial.network)
    images = trial.images.clone().requires_grad_()
    output = WAYS[peer](ours, images, grid.rows)
    return trial.errors(ours, images, output)


def dtensor_errors(communicator: Communicator, argument: dict[str, Any]) -> list[dict[str, Any]]:
    """On each of two ranks: the row of each cell, of images in two shards of rows or of columns."""
    mesh = init_device_mesh("cpu", (communicator.world,))
    return [_dtensor(mesh, cell) for cell in argument["cells"]]


def _dtensor(mesh: Any, cell: dict[str, Any]) -> dict[str, Any]:
    trial = _Trial(cell["operation"], tuple(cell["sides"]))
    ours = distribute_module(copy.deepcopy(trial.network), mesh)
    shards = [Shard(2 if cell["grid"] == "2x1" else 3)]
    images = distribute_tensor(trial.images, mesh, shards).requires_grad_()
    try:
        output = ours.after(ours.operation(ours.before(images)).redistribute(mesh, [Replicate()]))
        _weighted(output.full_tensor(), trial.weights(output.shape)).backward()
    except Exception as refusal:  # of any kind, by whatever of its layers
        return {"status": "refused", "note": " ".join(str(refusal).split())[:200]}
    return {"status": "computed", **trial.errors_of(output.full_tensor(), _whole(images.grad), _named(ours))}


def _whole(value: Any) -> Tensor | None:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _named(module: nn.Module) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    gradients = {name: _whole(parameter.grad) for name, parameter in module.named_parameters()}
    return gradients, {name: _whole(buffer) for name, buffer in module.named_buffers()}


def _weighted(output: Tensor, weights: Tensor) -> Tensor:
    return (output * weights).sum()


class _Trial:
    """A network and its images, run whole when it is made."""

    def __init__(self, operation: str, sides: tuple[int, int]) -> None:
        torch.manual_seed(0)
        network = OPERATIONS[operation].network().double()
        assert isinstance(network, Network)
        self.network, self._plain = network, copy.deepcopy(network)
        generator = torch.Generator().manual_seed(1)
        self.images = torch.randn(TILES, 2, *sides, generator=generator, dtype=torch.float64)
        self._entering = self.images.clone().requires_grad_()
        self._output = self._plain(self._entering)
        _weighted(self._output, self.weights(self._output.shape)).backward()

    def weights(self, shape: Any) -> Tensor:
        return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def errors(self, network: Network, images: Tensor, output: Tensor) -> dict[str, float]:
        if output.shape != self._output.shape:
            return dict.fromkeys(("output", "image", "parameters", "statistics"), float("inf"))
        _weighted(output, self.weights(output.shape)).backward()
        return self.errors_of(output, images.grad, _named(network))

    def errors_of(
        self,
        output: Tensor,
        image: Tensor | None,
        named: tuple[dict[str, Tensor | None], dict[str, Tensor | None]],
    ) -> dict[str, float]:
        gradients, buffers = _named(self._plain)
        return {
            "output": relative_errors({"": self._output.detach()}, {"": output.detach()})[""],
            "image": relative_errors({"": self._entering.grad}, {"": image})[""],
            "parameters": max(relative_errors(gradients, named[0]).values()),
            "statistics": max(relative_errors(buffers, named[1]).values(), default=0.0),
        }
