"""Parameters on the host: the plain model's numbers, with no more of it on the device than two units at a time."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from parallel.offload import packing
from parallel.offload.copies import Copies, Mark
from parallel.offload.host_optimizer import HostOptimizer
from parallel.offload.host_parameters import HostParameters, buffers_to
from parallel.offload.live_bytes import LiveBytes
from parallel.offload.packing import Packed, SavedTensor
from parallel.stage.stage import Loss
from tests.helpers.small_nets import NETS, batch_of, drawn_once, pixel_loss

CPU = torch.device("cpu")


class Awkward(nn.Module):
    """One weight in two layers, a layer called twice, parameters of its own, attention that asks for its parts' own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.twice = nn.Conv2d(8, 8, 1)
        self.tied = nn.Conv2d(8, 8, 1)
        self.tied.weight = self.twice.weight
        self.place = nn.Parameter(torch.randn(8, 1, 1))
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Conv2d(8, 3, 1)
        self.head.bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.randn(3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(images))) + self.place
        x = self.twice(torch.tanh(self.twice(x)))
        rows = x.flatten(2).transpose(1, 2)
        x = x + self.mix(rows, rows, rows)[0].transpose(1, 2).reshape(x.shape)
        logits: Tensor = self.head(self.drop(self.tied(x))) * self.scale
        return logits


class Counted(Copies):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak_bytes = 0

    def to_device(self, source: Tensor) -> tuple[Tensor, Mark]:
        tensor, mark = super().to_device(source)
        self._count(tensor.nbytes)
        weakref.finalize(tensor.untyped_storage(), self._count, -tensor.nbytes)
        return tensor, mark

    def _count(self, size: int) -> None:
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)


def counted(net: nn.Module) -> tuple[HostParameters, Counted]:
    copies = Counted()
    return HostParameters(net, CPU, copies), copies


MODELS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {**NETS, "awkward": (Awkward, pixel_loss)}


def model(name: str) -> tuple[nn.Module, Loss]:
    make, loss = MODELS[name]
    return drawn_once(("host", name), 3, lambda: make().double()), loss


def saving(host: HostParameters | None) -> contextlib.AbstractContextManager[Any]:
    """Forward passes in which the copies' tensors are kept as ``host`` says, and others as ever."""
    return packing.saving(host.packer(SavedTensor), ()) if host else contextlib.nullcontext()


def train(net: nn.Module, loss: Loss, host: HostParameters | None) -> Any:
    """All forward passes of a step before all backward passes. Gradients of the last step, and the state after it."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(2):
        optimizer.zero_grad()
        waiting = []
        for i, (images, targets) in enumerate(batch_of([2] * 3, 8, step, torch.float64)):
            torch.manual_seed(10 * step + i)
            with saving(host):
                waiting.append(loss(net(images), targets))
            assert not host or not host._present, "only what is computed now is on the device"
        for value in reversed(waiting):
            value.backward()
        optimizer.step()
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}, net.state_dict()


@pytest.mark.parametrize("traced", [False, True], ids=["as written", "traced"])
@pytest.mark.parametrize("name", MODELS)
def test_the_plain_models_numbers(name: str, traced: bool) -> None:
    (plain, loss), (net, _) = model(name), model(name)
    if traced:  # its parameters outside of layers are asked for from outside, too
        net, plain = fx.symbolic_trace(net), fx.symbolic_trace(plain)
    expected = train(plain, loss, None)
    host, copies = counted(net)
    torch.testing.assert_close(train(net, loss, host), expected, rtol=1e-12, atol=1e-13)
    assert copies.bytes == 0
    assert 0 < copies.peak_bytes < sum(p.nbytes for p in net.parameters())


def deep(layers: int = 6, width: int = 16) -> nn.Sequential:
    def make() -> nn.Sequential:
        return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())))

    return drawn_once(("deep", layers, width), 5, make)


LAYER = 4 * (16 * 16 + 16)


def test_two_layers_are_on_the_device_at_a_time() -> None:
    net = deep()
    host, copies = counted(net)
    for _ in range(2):
        copies.peak_bytes = 0
        with saving(host):
            losses = [net(torch.randn(4, 16)).sum() for _ in range(3)]
        forward = copies.peak_bytes
        assert copies.bytes == 0
        copies.peak_bytes = 0
        for loss in losses:
            loss.backward()
        assert copies.bytes == 0
        assert copies.peak_bytes == 2 * LAYER - 2 * 16 * 4, "biases are not asked for in backward"
    assert forward == 2 * LAYER


def test_a_step_makes_nothing_else_on_the_device_than_activations_and_one_layers_gradient() -> None:
    net = deep(8, 64)
    layer, activation = 4 * (64 * 64 + 64), 4 * 2 * 64
    host = HostParameters(net, CPU, Copies())
    optimizer = HostOptimizer(torch.optim.AdamW, dict(net.named_parameters()), Copies(), resident=True)
    for _ in range(2):
        with LiveBytes() as live:
            optimizer.begin_step()
            with saving(host):
                losses = [net(torch.randn(2, 64)).sum() for _ in range(2)]
            losses[0].backward()
            optimizer.expect_final_grads(0.1)
            losses[1].backward()
            optimizer.apply(0.1)
        assert 3 * layer < live.peak_bytes < 3 * layer + 20 * activation
        assert live.bytes < layer, "gradients and the optimizer's state are on the host"


class Noting(Copies):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.names = {p.data_ptr(): name for name, p in net.named_parameters()}
        self.notes: list[str] = []

    def to_device(self, source: Tensor) -> tuple[Tensor, Mark]:
        name = self.names[source.data_ptr()]
        self.notes.append(f"copy {name}")
        tensor, _ = super().to_device(source)
        return tensor, name

    def wait(self, mark: Mark) -> None:
        self.notes.append(f"wait {mark}")


def test_the_next_layers_copies_are_begun_before_they_are_waited_for() -> None:
    net = deep(3)
    copies = Noting(net)
    host = HostParameters(net, CPU, copies)
    for part in net:
        if isinstance(part, nn.Linear):
            part.register_full_backward_hook(lambda *_: copies.notes.append("backward"))
    with saving(host):
        net(torch.randn(4, 16))  # the order is learned here
        copies.notes.clear()
        loss = net(torch.randn(4, 16, requires_grad=True)).sum()
    notes = [note.removesuffix(".weight") for note in copies.notes if "weight" in note]
    assert notes == ["copy 0", "copy 2", "wait 0", "copy 4", "wait 2", "wait 4"]
    copies.notes.clear()
    loss.backward()
    notes = [note.removesuffix(".weight") for note in copies.notes]
    assert notes[:5] == ["copy 4", "copy 2", "wait 4", "backward", "copy 0"]
    assert notes[5:] == ["wait 2", "backward", "wait 0", "backward"]


def test_another_way_through_the_layers_than_last_time_costs_copies_and_nothing_else() -> None:
    net = deep(4)
    plain = copy.deepcopy(net)
    host, copies = counted(net)
    x = torch.randn(4, 16)
    for order in ([0, 2, 4, 6], [6, 0, 2], [4, 4, 0], [0, 6]):
        for layers in (net, plain):
            value = x
            with saving(host), host.running() if layers is net else contextlib.nullcontext():
                for number in order:
                    value = layers[number](value)
            value.sum().backward()
        assert copies.bytes == 0
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert copies.peak_bytes <= 3 * LAYER


def test_what_cannot_be_computed_is_refused_and_leaves_nothing_on_the_device() -> None:
    net = deep(2)
    host, copies = counted(net)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        net(torch.randn(4, 17))
    assert copies.bytes == 0
    assert net[0].weight is dict(net.named_parameters())["0.weight"], "nothing runs now"
    loss = net(torch.randn(4, 16)).sum()  # without claims autograd holds the copies, and gives them back
    assert copies.bytes >= 4 * 16 * 16
    loss.backward()
    assert copies.bytes == 0
    with saving(host):
        loss = net(torch.randn(4, 16)).sum()
    with torch.no_grad():
        net[2].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(ValueError, match="rnn keeps a list of its own"):
        HostParameters(nn.ModuleDict({"rnn": nn.LSTM(2, 2)}), CPU, Copies())


def test_outside_of_a_pass_the_module_is_what_it_was() -> None:
    net, plain = model("awkward")[0], model("awkward")[0]
    before = dict(net.named_parameters())
    _, copies = counted(net)
    assert dict(net.named_parameters()) == before
    assert net.get_parameter("mix.out_proj.weight") is before["mix.out_proj.weight"]
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    net.load_state_dict(plain.state_dict())
    torch.testing.assert_close(net.state_dict(), plain.state_dict(), rtol=0, atol=0)
    assert copies.peak_bytes == 0


def test_what_is_not_a_copy_is_packed_by_others() -> None:
    def keep(tensor: Tensor) -> Packed:
        packed.append(tensor.shape)
        return SavedTensor(tensor)

    packed: list[torch.Size] = []
    net = deep(2)
    with packing.saving(HostParameters(net, CPU, Copies()).packer(keep), ()):
        loss = net(torch.ones(4, 16)).sum()
    assert packed
    assert set(packed) == {torch.Size([4, 16])}
    loss.backward()
    assert all(p.grad is not None for p in net.parameters())


def test_only_buffers_are_moved() -> None:
    norm = nn.BatchNorm2d(2)
    pair = nn.ModuleList([norm, norm])
    pair.register_buffer("mean", norm.running_mean)
    buffers_to(pair, torch.device("meta"))
    assert {buffer.device.type for buffer in pair.buffers()} == {"meta"}
    assert pair.mean is norm.running_mean
    assert {p.device.type for p in pair.parameters()} == {"cpu"}
