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

from parallel import build as assembling
from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.optimizer_step import OptimizerStep
from parallel.engine.step import Microbatch
from parallel.offload.copies import Copies
from parallel.offload.host_optimizer import HostOptimizer
from parallel.offload.host_parameters import HostParameters
from parallel.stage.stage import Loss
from parallel.strategy import Strategy
from tests.helpers.small_nets import NETS, TwoOutputs, batch_of, drawn_once, two_losses

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
        part.backward()  # type: ignore[no-untyped-call]


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
    return copy.deepcopy({"model": dict(net.state_dict()), "optimizer": optimizer.state_dict()})


def assert_same_bits(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same_bits(found[key], value)
    elif isinstance(expected, Tensor):
        assert torch.equal(found, expected)
    else:
        assert found == expected


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


@pytest.mark.long
@PLACES
@BOTH
def test_a_run_is_continued_with_and_without_the_host(optimizer: str, resident: bool) -> None:
    (plain, loss), (net, _), (last, _) = model("skips"), model("skips"), model("skips")
    theirs = OPTIMIZERS[optimizer](plain.named_parameters())
    plain_steps(plain, loss, theirs, range(2))
    saved = state(plain, theirs)
    plain_steps(plain, loss, theirs, range(2, 6))

    host = on_host(net, optimizer, resident)
    host_steps(net, loss, host, range(1), early=True)  # of what is loaded nothing may be left of it
    net.load_state_dict(saved["model"])
    host.optimizer.load_state_dict(saved["optimizer"])
    host_steps(net, loss, host, range(2, 4), early=True)
    saved = state(net, host.optimizer)

    again = OPTIMIZERS[optimizer](last.named_parameters())
    last.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    plain_steps(last, loss, again, range(4, 6))
    assert_same_bits(state(last, again), state(plain, theirs))


@PLACES
@BOTH
def test_a_step_that_is_given_up_changes_nothing(optimizer: str, resident: bool) -> None:
    (net, loss), (plain, _) = model("two-outputs"), model("two-outputs")
    host, theirs = on_host(net, optimizer, resident), OPTIMIZERS[optimizer](plain.named_parameters())
    for step in range(2):  # in the first, there is no state to go back to
        before = state(net, host.optimizer)
        host.begin_step()
        buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
        backward(net, loss, 7, functools.partial(host.expect_final_grads, LR / (step + 1)))
        host.rollback()
        with torch.no_grad():
            for name, buffer in net.named_buffers():
                buffer.copy_(buffers[name])
        found = state(net, host.optimizer)
        assert_same_bits(found["model"], before["model"])
        assert_same_bits(found["optimizer"]["state"], before["optimizer"]["state"])
        host_steps(net, loss, host, range(step, step + 1), early=True)
        plain_steps(plain, loss, theirs, range(step, step + 1))
        assert_same_bits(state(net, host.optimizer), state(plain, theirs))


class Telling(torch.optim.SGD):
    """Says when it has updated something, and fails with ``fault``."""

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


def chain() -> nn.Sequential:
    return drawn_once("chain", 2, lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)))  # type: ignore[return-value]


def test_the_last_layer_is_updated_while_the_first_is_still_at_its_backward_pass() -> None:
    net = chain()
    host = HostOptimizer(Telling, dict(net.named_parameters()), Copies())
    assert isinstance(host.optimizer, Telling)
    stepped = host.optimizer.stepped
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    seen = []

    def at_the_first(gradient: Tensor) -> None:
        assert stepped.wait(PATIENCE_S), "nothing was updated while the backward pass went on"
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
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.detach(), before[name] - LR * parameter.grad)
    assert sum(host.optimizer.calls) == 4, "each parameter once"


@pytest.mark.parametrize("early", [True, False])
def test_what_the_thread_fails_with_is_raised_when_the_step_is_applied(early: bool) -> None:
    net = chain()
    host = HostOptimizer(Telling, dict(net.named_parameters()), Copies())
    assert isinstance(host.optimizer, Telling)
    host.optimizer.fault = OSError("no more memory")
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    host.begin_step()
    if early:
        host.expect_final_grads(LR)
    net(torch.ones(2, 4)).sum().backward()
    with pytest.raises(OSError, match="no more memory"):
        host.apply(LR)
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())


def test_only_named_parameters_are_updated_early() -> None:
    net = chain()
    host = HostOptimizer(Telling, dict(net.named_parameters()), Copies())
    assert isinstance(host.optimizer, Telling)
    host.begin_step()
    host.expect_final_grads(LR, ["0.weight"])
    net(torch.ones(2, 4)).sum().backward()
    assert host.optimizer.stepped.wait(PATIENCE_S)
    host.rollback()
    assert host.optimizer.calls == [1]


@PLACES
@pytest.mark.parametrize("scale", [1, 0.5])
def test_an_update_scales_after_early_steps_too(scale: float, resident: bool) -> None:
    net, plain = chain(), chain()
    if resident:
        HostParameters(net, CPU, Copies())
    make = OPTIMIZERS["adamw"]
    ours, theirs = dict(net.named_parameters()), dict(plain.named_parameters())
    update = OptimizerStep(
        make, owned=ours, unshared=ours.values(), held=ours.values(), offload=Copies(), resident=resident
    )
    other = OptimizerStep(make, owned=theirs, unshared=theirs.values(), held=theirs.values())
    for step in range(2):
        for each, layers in ((update, net), (other, plain)):
            each.begin_step()
            each.expect_final_grads(dict(layers.named_parameters()), LR)
            layers(torch.full((2, 4), step + 1.0)).sum().backward()
            each.apply(LR, scale)
    assert_same_bits(dict(net.state_dict()), dict(plain.state_dict()))


def test_shared_gradients_wait_for_their_sum() -> None:
    net = chain()
    shared, own = dict(net[0].named_parameters(prefix="0")), dict(net[2].named_parameters(prefix="2"))
    update = OptimizerStep(Telling, owned=shared | own, unshared=own.values(), held=net.parameters(), offload=Copies())
    assert isinstance(update.optimizer, Telling)
    update.begin_step()
    update.expect_final_grads(shared | own, LR)
    net(torch.ones(2, 4)).sum().backward()
    update.rollback()
    assert sum(update.optimizer.calls) == len(own)


@BOTH
@pytest.mark.parametrize(
    "strategy",
    [Strategy("1f1b", 3, 3, 4), Strategy("bidirectional", 2, 2, 4, zero=1)],
    ids=["1f1b", "pairs"],
)
def test_checkpoints_of_all_ranks_are_those_without_the_host(
    strategy: Strategy, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rank(communicator: Communicator, saved: Any) -> dict[str, Any]:
        engine = assembling.assemble(
            drawn_once("host checkpoints", 8, lambda: TwoOutputs().double()),
            two_losses,
            OPTIMIZERS[optimizer],
            communicator,
            strategy,
            shape=(1, 3, 8, 8),
            batch=4,
            device=CPU,
            seed=4,
        )
        if saved:
            engine.load_state_dict(copy.deepcopy(saved))
        for step in range(2):
            tiles = batch_of([1] * 4, 8, 50 + step, torch.float64)
            engine.step([Microbatch(*tiles[i], (1, 3, 8, 8)) for i in engine.share], step, LR)
        return copy.deepcopy(engine.state_dict())

    def runs() -> list[dict[str, Any]]:
        first = run_on_threads(strategy.ranks, rank, None)[0]
        return [first, run_on_threads(strategy.ranks, rank, first)[0]]

    expected = runs()
    monkeypatch.setattr(assembling, "OptimizerStep", functools.partial(OptimizerStep, offload=Copies()))
    for ours, theirs in zip(runs(), expected, strict=True):
        assert_same_bits(ours, theirs)
