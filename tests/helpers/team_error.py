"""A model computed by a team whose members are threads, held against the model itself: outputs, all gradients, running
statistics.

Takes what makes a model, the shape of tiles and a grid; gives the largest errors, each relative to the largest value of
the tensor it is in.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import run_on_threads
from parallel.graph.partition import Partition
from parallel.space.team import TeamGrid
from parallel.team.team_comm import TeamComm
from parallel.team.team_plan import BoxedParts, team_plans
from parallel.team.team_stages import team_stages
from parallel.trace.trace import trace_as_it_runs
from tests.helpers.plain_step import relative_errors

SEED, PATIENCE_S = 5, 60
CPU = torch.device("cpu")


@dataclass(frozen=True)
class TeamErrors:
    """Errors of a team against one device.

    Attributes:
        output, image, parameters, statistics: largest relative errors: of the outputs, of the gradients of the images
            and of the parameters, and of the buffers.
        worst: the parameter whose error is largest.
        ends_at: (layer, reason) where member 0 goes on alone.
        sent_bytes: by member.
    """

    output: float
    image: float
    parameters: float
    statistics: float
    worst: str
    ends_at: tuple[str, str] | None
    sent_bytes: tuple[int, ...]

    @property
    def largest(self) -> float:
        return max(self.output, self.image, self.parameters, self.statistics)


def team_error(
    model: nn.Module,
    shape: Sequence[int],
    grid: TeamGrid,
    training: bool = True,
    patience_s: float = PATIENCE_S,
    boxed: BoxedParts | None = None,
) -> TeamErrors:
    """Return the errors of one forward and backward pass of ``model``, in its own type, on tiles of ``shape``.

    Args:
        boxed: how members' parts are computed box by box, which gives images no gradient; None: at once.

    Raises:
        ValueError: the model is refused.
    """
    shape = tuple(shape)
    parameters = list(model.parameters())
    dtype = parameters[0].dtype
    generator = torch.Generator().manual_seed(1)
    layout = torch.channels_last if _channels_last(parameters) else torch.contiguous_format
    images = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).contiguous(memory_format=layout)
    plain = copy.deepcopy(model).train(training)
    entering = images.clone().requires_grad_()
    torch.manual_seed(SEED)
    output = plain(entering)
    weights = [torch.randn(leaf.shape, generator=generator, dtype=torch.float64).to(dtype) for leaf in _floats(output)]
    _loss(output, weights).backward()
    traced = trace_as_it_runs(model, shape, dtype)

    def member(communicator: Communicator, _: None) -> dict[str, Any]:
        link, own = TeamComm(communicator), copy.deepcopy(traced)
        plans, whole = team_plans(own, grid, once=boxed is None), Partition(own.graph, (0,))
        stage = team_stages(own, whole, [0], grid, link, plans, CPU, boxed=boxed)[0].train(training)
        image = images.clone().requires_grad_(boxed is None)
        with stage.context(shape, SEED) as passing:
            (value,) = stage(stage.tiles(image, shape))
        loss = _loss(value, weights) if link.member == 0 else sum(leaf.sum() for leaf in _floats(value))
        loss.backward()
        link.finish()
        return {
            "output": value,
            "image": image.grad,
            "parameters": {name: parameter.grad for name, parameter in stage.named_parameters()},
            "buffers": dict(stage.named_buffers()),
            "ends_at": passing.plan.ends_at,
            "sent": link.sent_bytes,
        }

    members = run_on_threads(grid.members, member, [None] * grid.members, timeout_s=patience_s)
    first = members[0]
    pairs = zip(_floats(output), _floats(first["output"]), strict=True)
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    ours = {name: _total([each["parameters"].get(name) for each in members]) for name in gradients}
    errors = relative_errors(gradients, ours)
    worst = max(errors, key=lambda name: errors[name], default="")
    statistics = relative_errors(
        dict(plain.named_buffers()), {n: first["buffers"].get(n) for n, _ in plain.named_buffers()}
    )
    return TeamErrors(
        max(relative_errors({"": expected.detach()}, {"": found.detach()})[""] for expected, found in pairs),
        0.0 if boxed else relative_errors({"": entering.grad}, {"": _total([each["image"] for each in members])})[""],
        errors.get(worst, 0.0),
        max(statistics.values(), default=0.0),
        worst,
        first["ends_at"],
        tuple(each["sent"] for each in members),
    )


def _channels_last(parameters: Sequence[Tensor]) -> bool:
    weights = [parameter for parameter in parameters if parameter.dim() == 4]
    return any(w.is_contiguous(memory_format=torch.channels_last) and not w.is_contiguous() for w in weights)


def _floats(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point())


def _loss(output: Any, weights: Sequence[Tensor]) -> Tensor:
    return torch.stack([(leaf * weight).sum() for leaf, weight in zip(_floats(output), weights, strict=True)]).sum()


def _total(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of what members have; None where none has any."""
    there = [gradient for gradient in gradients if gradient is not None]
    return torch.stack(there).sum(0) if there else None
