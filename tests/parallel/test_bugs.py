"""What once went wrong. Each test begins with the story."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.build import assemble
from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.step import Microbatch
from parallel.memory.policy import ActivationPolicy
from parallel.strategy import Strategy
from tests.helpers.small_nets import TwoOutputs, batch_of, two_losses


@pytest.mark.parametrize("schedule", ["zero-bubble", "1f1b"])
def test_weight_decay_of_a_parameter_that_no_loss_reaches(schedule: str) -> None:
    """zero-bubble in two groups gave a zero gradient to a parameter that the model does not use, where the plain step
    has none: the exchange could not see which gradients had been added after the backward pass and took all of them
    for touched. Weight decay then shrank the parameter, by 3e-6 in two steps, which the table of exactness showed.
    """
    torch.manual_seed(2)
    model = TwoOutputs().double()
    sgd = functools.partial(torch.optim.SGD, lr=0.1, weight_decay=0.5)
    tiles = batch_of([1] * 4, 8, 0, torch.float64)

    def rank(communicator: Communicator, _: None) -> tuple[set[str], dict[str, Any]]:
        engine = assemble(
            copy.deepcopy(model),
            two_losses,
            sgd,
            communicator,
            Strategy(schedule, 4, 2, 4),
            shape=(1, 3, 8, 8),
            batch=4,
            device=torch.device("cpu"),
        )
        engine.step([Microbatch(*tiles[i], (1, 3, 8, 8)) for i in engine.share], 0, 0.1)
        return set(engine.gradients()), engine.state_dict()

    ranks = run_on_threads(4, rank)
    names = set().union(*(found for found, _ in ranks))
    unused = {"unused.weight", "unused.bias"}
    assert names == {name for name, _ in model.named_parameters()} - unused
    after = ranks[0][1]["model"]
    assert {name for name, value in model.named_parameters() if torch.equal(after[name], value)} == unused


@pytest.mark.parametrize("schedule", ["master", "zero-bubble"])
def test_engines_that_are_let_go_of_free_their_parameters(schedule: str) -> None:
    """Ranks that ran one engine after the other grew by a model each time until the machine killed one: hooks held the
    gradient exchange, which holds the parameters that the hooks are on, and the garbage collector does not look into
    hooks.
    """
    held: list[weakref.ref[nn.Parameter]] = []

    def rank(communicator: Communicator, _: None) -> None:
        def sgd(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
            own = list(parameters)
            held.extend(weakref.ref(parameter) for _, parameter in own)
            return torch.optim.SGD(own, lr=0.1)

        strategy = Strategy(schedule, 4, 2, 4)
        shape = (1, 3, 8, 8)
        tiles = batch_of([1] * 4, 8, 0, torch.float32)
        engine = assemble(
            TwoOutputs(), two_losses, sgd, communicator, strategy, shape=shape, batch=4, device=torch.device("cpu")
        )
        engine.step([Microbatch(*tiles[i], shape) for i in engine.share], 0, 0.1)
        engine.close()

    run_on_threads(4, rank)
    gc.collect()
    assert held
    assert not [reference for reference in held if reference() is not None]


class NormAndReLU(nn.BatchNorm2d):
    """As timm has one: batch norm and activation in one layer."""

    def forward(self, images: Tensor) -> Tensor:
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        momentum = self.momentum or 0.0
        norm = F.batch_norm(
            images, self.running_mean, self.running_var, self.weight, self.bias, self.training, momentum, self.eps
        )
        return norm.relu()


@pytest.mark.parametrize(
    "strategy",
    [Strategy("master", 2, 2, 4), Strategy("gpipe", 2, 2, 4, policy=ActivationPolicy(recompute="stage"))],
    ids=["master", "gpipe, recomputed"],
)
def test_running_statistics_of_batch_norms_that_are_not_torchs_own(strategy: Strategy) -> None:
    """timm's BatchNormAct2d was traced into: its stage held two bare tensors in place of a normalisation layer, nobody
    kept them right, and under master the running statistics of an EfficientNet were those of half of the tiles, under
    recomputation those of all of them twice."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), NormAndReLU(4), nn.Conv2d(4, 4, 3), NormAndReLU(4), nn.Flatten(2), nn.AdaptiveAvgPool1d(1)
    ).double()
    tiles = batch_of([2] * 4, 8, 0, torch.float64)
    plain = copy.deepcopy(model).train()
    for images, _ in tiles:
        plain(images)

    def rank(communicator: Communicator, _: None) -> dict[str, Any]:
        engine = assemble(
            copy.deepcopy(model),
            lambda output, targets: output.square().mean(),
            functools.partial(torch.optim.SGD, lr=0.0),
            communicator,
            strategy,
            shape=(2, 3, 8, 8),
            batch=8,
            device=torch.device("cpu"),
        )
        engine.step([Microbatch(*tiles[i], (2, 3, 8, 8)) for i in engine.share], 0, 0.0)
        return engine.state_dict()

    torch.testing.assert_close(dict(run_on_threads(2, rank)[0]["model"]), dict(plain.state_dict()))
