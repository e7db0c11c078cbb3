"""The optimizer on the host: the plain one's numbers bit for bit, early or late, and none before the step is sure."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from parallel.engine.optimizer_step import OptimizerStep
from parallel.offload.copies import Copies
from parallel.offload.host_optimizer import HostOptimizer
from parallel.offload.host_parameters import HostParameters
from parallel.stage.stage import Loss
from tests.helpers.small_nets import NETS, batch_of, drawn_once

CPU, LR, PATIENCE_S = torch.device("cpu"), 0.05, 60
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=9.0, momentum=0.9, weight_decay=0.01),
    "adamw": functools.partial(torch.optim.AdamW, lr=9.0, betas=(0.8, 0.95), weight_decay=0.1),
}
BOTH = pytest.mark.parametrize("optimizer", OPTIMIZERS)
PLACES = pytest.mark.parametrize("resident", [False, True], ids=["on the device", "on the host"])


def model(name: str) -> tuple[nn.Module, Loss]:
    make, loss = NETS[name]
    return drawn_once(("optimizer", name), 3, lambda: make().double()), loss


def backward(net: nn.Module, loss: Loss, step: int, before_last: Callable[[], None] = lambda: None) -> None:
    net.zero_grad()
    parts = []
    for i, (images, targets) in enumerate(batch_of([2] * 3, 8, step, torch.float64)):
        torch.manual_seed(10 * step + i)
        parts.append(loss(net(images), targets))
    for i, part in enumerate(parts):
        if i == 2:
            before_last()
        part.backward()


def plain_steps(net: nn.Module, loss: Loss, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = LR / (step + 1)
        backward(net, loss, step)
        optimizer.step()


def host_steps(net: nn.Module, loss: Loss, host: HostOptimizer, steps: range, early: bool) -> None:
    for step in steps:
        rate = LR / (step + 1)
        host.begin_step()
        backward(net, loss, step, functools.partial(host.expect_final_grads, rate) if early else lambda: None)
        host.apply(rate)


def on_host(net: nn.Module, optimizer: str, resident: bool) -> HostOptimizer:
    if resident:
        HostParameters(net, CPU, Copies())
    return HostOptimizer(OPTIMIZERS[optimizer], dict(net.named_parameters()), Copies(), resident=resident)


def state(net: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return copy.deepcopy({"model": net.state_dict(), "optimizer": optimizer.state_dict()["state"]})


assert_same_bits = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


@pytest.mark.pairs
@PLACES
@BOTH
@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
@pytest.mark.parametrize("name", NETS)
def test_the_plain_optimizers_numbers(name: str, early: bool, optimizer: str, resident: bool) -> None:
    (plain, loss), (net, _) = model(name), model(name)
    theirs = OPTIMIZERS[optimizer](plain.named_parameters())
    plain_steps(plain, loss, theirs, range(3))
    host = on_host(net, optimizer, resident)
    host_steps(net, loss, host, range(3), early)
    assert_same_bits(state(net, host.optimizer), state(plain, theirs))
    for own, parameter in zip(host.owned.values(), net.parameters(), strict=True):
        assert (own.data_ptr() == parameter.data_ptr()) == resident


@PLACES
@BOTH
def test_a_step_that_is_given_up_changes_nothing(optimizer: str, resident: bool) -> None:
    (net, loss), (plain, _) = model("two-outputs"), model("two-outputs")
    host, theirs = on_host(net, optimizer, resident), OPTIMIZERS[optimizer](plain.named_parameters())
    for step in range(3):  # in the first, there is no state to go back to; in the last, some was put back before
        before = state(net, host.optimizer)
        host.begin_step()
        buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
        backward(net, loss, 7, functools.partial(host.expect_final_grads, LR / (step + 1)))
        host.rollback()
        with torch.no_grad():
            for name, buffer in net.named_buffers():
                buffer.copy_(buffers[name])
        assert_same_bits(state(net, host.optimizer), before)
        host_steps(net, loss, host, range(step, step + 1), early=True)
        plain_steps(plain, loss, theirs, range(step, step + 1))
        assert_same_bits(state(net, host.optimizer), state(plain, theirs))


class Telling(torch.optim.SGD):
    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, lr=9.0)
        self.stepped = threading.Event()
        self.fault: Exception | None = None
        self.calls: list[int] = []

    def step(self, closure: Any = None) -> None:
        if self.fault:
            raise self.fault
        super().step(closure)
        self.calls.append(sum(p.grad is not None for group in self.param_groups for p in group["params"]))
        self.stepped.set()


Chain = tuple[nn.Sequential, HostOptimizer, dict[str, Tensor]]


@pytest.fixture
def chain() -> Chain:
    net = two_layers()
    return net, HostOptimizer(Telling, dict(net.named_parameters()), Copies()), copy.deepcopy(net.state_dict())


def two_layers() -> nn.Sequential:
    return drawn_once("chain", 2, lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)))


def test_the_last_layer_is_updated_while_the_first_is_still_at_its_backward_pass(chain: Chain) -> None:
    net, host, before = chain
    seen = []

    def at_the_first(gradient: Tensor) -> None:
        assert host.optimizer.stepped.wait(PATIENCE_S), "nothing was updated while the backward pass went on"
        seen.append(torch.equal(net[2].bias, before["2.bias"]))

    host.begin_step()
    value = net[0](torch.ones(2, 4))
    value.register_hook(at_the_first)
    loss = net[2](net[1](value)).sum()
    host.expect_final_grads(LR)
    loss.backward()
    assert seen == [True], "the device has the old values until the step is applied"
    host.apply(LR)
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name] - LR * parameter.grad)
    assert sum(host.optimizer.calls) == 4, "each parameter once"


@pytest.mark.parametrize("early", [True, False])
def test_what_the_thread_fails_with_is_raised_when_the_step_is_applied(early: bool, chain: Chain) -> None:
    net, host, before = chain
    host.optimizer.fault = OSError("no more memory")
    host.begin_step()
    if early:
        host.expect_final_grads(LR)
    net(torch.ones(2, 4)).sum().backward()
    with pytest.raises(OSError, match="no more memory"):
        host.apply(LR)
    assert_same_bits(net.state_dict(), before)


def test_a_gradient_that_comes_after_the_update_of_its_parameter_is_refused(chain: Chain) -> None:
    net, host, before = chain
    host.begin_step()
    host.expect_final_grads(LR)
    value = torch.ones(2, 4, requires_grad=True)
    for _use in range(2):
        value = checkpoint(net[0], value, use_reentrant=True)
    with pytest.raises(ValueError, match="use_reentrant=False, or leave --offload-state out"):
        value.sum().backward()
    host.rollback()
    assert_same_bits(net.state_dict(), before)


def test_only_named_parameters_are_updated_early_and_shared_ones_after_their_sum(chain: Chain) -> None:
    net, host, _ = chain
    host.begin_step()
    host.expect_final_grads(LR, ["0.weight"])
    net(torch.ones(2, 4)).sum().backward()
    assert host.optimizer.stepped.wait(PATIENCE_S)
    host.rollback()
    assert host.optimizer.calls == [1]
    shared, own = dict(net[0].named_parameters(prefix="0")), dict(net[2].named_parameters(prefix="2"))
    owned = shared | own
    update = OptimizerStep(Telling, owned=owned, unshared=own.values(), held=owned, offload=Copies())
    update.begin_step()
    update.expect_final_grads(shared | own, LR)
    net(torch.ones(2, 4)).sum().backward()
    update.rollback()
    assert sum(update.optimizer.calls) == len(own)


@PLACES
@pytest.mark.parametrize("scale", [1, 0.5])
def test_an_update_scales_after_early_steps_too(scale: float, resident: bool) -> None:
    net, plain = two_layers(), two_layers()
    if resident:
        HostParameters(net, CPU, Copies())
    make = OPTIMIZERS["adamw"]
    ours, theirs = dict(net.named_parameters()), dict(plain.named_parameters())
    update = OptimizerStep(make, owned=ours, unshared=ours.values(), held=ours, offload=Copies(), resident=resident)
    other = OptimizerStep(make, owned=theirs, unshared=theirs.values(), held=theirs)
    for step in range(2):
        for each, layers in ((update, net), (other, plain)):
            each.begin_step()
            each.expect_final_grads(dict(layers.named_parameters()), LR)
            layers(torch.full((2, 4), step + 1.0)).sum().backward()
            each.apply(LR, scale)
    assert_same_bits(dict(net.state_dict()), dict(plain.state_dict()))
