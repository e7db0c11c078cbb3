"""Values arrive as they were sent: structure, layout, numbers between tensors; bytes of a stranger make nothing."""

from __future__ import annotations

import collections
import functools
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.comm.communicator import Communicator
from parallel.comm.objects import UnknownTypeError, dump, load
from parallel.comm.thread_comm import LocalCommunicator, run_on_threads
from parallel.engine import transfers as transfers_module
from parallel.engine.messages import Form, Messenger, TensorForm, take_apart
from parallel.engine.transfers import Parcel, StageTransfers
from parallel.schedule.action import Action
from parallel.schedule.mesh import Mesh
from tests.helpers.small_nets import Pair
from tests.helpers.watched_comm import WatchedCommunicator

CPU = torch.device("cpu")
DEVICE = torch.device("meta")
"""Stands for a GPU, but for its numbers."""


def a_value() -> dict[str, Any]:
    image = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
    return {
        "last": image.to(memory_format=torch.channels_last).requires_grad_(),
        "pair": Pair(torch.tensor([1, 2]), (torch.tensor(True), image[:, :, ::2])),
        "size": image.shape[2:],
        "factor": 2.5,
        "nothing": None,
    }


def same(found: Any, expected: Any) -> bool:
    form, tensors = take_apart(found)
    other, others = take_apart(expected)
    return (
        form.spec == other.spec
        and form.constants == other.constants
        and all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(tensors, others, strict=True))
    )


def test_any_structure_arrives_as_it_was_sent() -> None:
    def talk(communicator: Communicator, _: Any) -> None:
        messenger = Messenger(communicator, CPU)
        if communicator.rank == 0:
            for _repeat in range(3):
                messenger.send(1, "values", a_value())
            messenger.finish()
            return
        incoming = [messenger.post(0, "values") for _ in range(3)]
        for message in incoming:
            form, tensors = message.wait()
            value = form.build(tensors)
            assert same(value, a_value())
            assert isinstance(value["pair"], Pair)
            assert value["size"].numel() == 20
            assert value["last"].is_contiguous(memory_format=torch.channels_last)
            assert [tensor.needs_grad for tensor in form.tensors] == [True, False, False, False]

    run_on_threads(2, talk, timeout_s=30)


def noted(communicator: Communicator, device: torch.device) -> tuple[Messenger, list[str], list[int]]:
    """Also the kind of device of each message, from both of its ends, and the tags of those that are sent."""
    kinds, tags = list[str](), list[int]()

    def tell(name: str, tensor: torch.Tensor, peer: int, tag: int) -> None:
        kinds.append(tensor.device.type)
        tags.extend([tag] if name == "isend" else [])

    return Messenger(WatchedCommunicator(communicator, tell), device), kinds, tags


def test_the_form_is_told_once_for_each_kind() -> None:
    def talk(communicator: Communicator, _: Any) -> list[int]:
        messenger, _, tags = noted(communicator, CPU)
        for height in (4, 4, 6, 4):
            if communicator.rank == 0:
                messenger.send(1, height, torch.zeros(1, height))
            else:
                _, (tensor,) = messenger.post(0, height).wait()
                assert tensor.shape == (1, height)
        messenger.finish()
        return tags

    assert run_on_threads(2, talk, timeout_s=30)[0] == [0, 0, 0, 1, 2, 2, 2, 3]  # length, header, tensor; tensors alone


class Plain:
    """An object of a user's own class."""


def test_a_value_of_another_form_or_of_a_type_of_its_own_is_refused() -> None:
    def talk(communicator: Communicator, _: Any) -> None:
        messenger = Messenger(communicator, CPU)
        if communicator.rank == 0:
            messenger.send(1, "values", torch.zeros(2, 3))
            with pytest.raises(ValueError, match=r"\(2, 4\) float32 .* where \(2, 3\) float32 was announced"):
                messenger.send(1, "values", torch.zeros(2, 4))
            with pytest.raises(ValueError, match=r"between stages go tensors, .*Plain is not plain data.*--cuts"):
                messenger.send(1, "more values", (torch.ones(1), Plain()))
            messenger.finish()
        else:
            messenger.post(0, "values").wait()

    run_on_threads(2, talk, timeout_s=30)


def test_gradients_come_back_in_the_layout_of_their_values() -> None:
    form, tensors = take_apart(a_value())
    gradient = form.gradient()
    assert [tensor.shape for tensor in gradient.tensors] == [(2, 3, 4, 5)]
    assert gradient.tensors[0].empty(CPU).is_contiguous(memory_format=torch.channels_last)
    plain = torch.randn(2, 3, 4, 5)
    laid_out = gradient.tensors[0].dense(plain)
    assert torch.equal(laid_out, plain)
    assert laid_out.is_contiguous(memory_format=torch.channels_last)
    assert form.tensors[0].dense(tensors[0]).data_ptr() == tensors[0].data_ptr()  # nothing copied where it fits


@pytest.mark.parametrize("tensor", [torch.zeros(3, 1, 1, 4), torch.zeros(()), torch.zeros(0, 3), torch.zeros(2, 3).t()])
def test_every_layout_has_a_form(tensor: torch.Tensor) -> None:
    like = TensorForm.of(tensor).empty(CPU)
    assert like.shape == tensor.shape
    assert like.stride() == tensor.stride() or tensor.numel() <= 12
    assert TensorForm.of(tensor, CPU).empty(DEVICE).device == DEVICE  # of a rank on the CPU, and on a device
    assert TensorForm.of(tensor.to(DEVICE), DEVICE).empty(CPU).device == CPU


def test_a_tensor_on_the_host_is_received_on_the_host() -> None:
    """A random state, or a CPU tensor of the user's model. NCCL would wait for it for ever."""

    def talk(communicator: Communicator, _: Any) -> list[str]:
        messenger, kinds, _ = noted(communicator, DEVICE)
        value = {"map": torch.ones(2, 3, device=DEVICE), "table": torch.arange(3.0, requires_grad=True)}
        for _repeat in range(2):
            if communicator.rank == 0:
                gradient = messenger.send(1, "values", value).gradient()
                _, (table,) = messenger.post(1, form=gradient).wait()
            else:
                form, (arrived, table) = messenger.post(0, "values").wait()
                assert arrived.device.type == "meta"
                messenger.send_tensors(0, [table], form.gradient().tensors)
            assert table.tolist() == [0, 1, 2]
        messenger.finish()
        return kinds

    sent, received = run_on_threads(2, talk, timeout_s=30)
    assert sent == received == ["cpu", "cpu", "meta", "cpu", "cpu", "meta", "cpu", "cpu"]


def test_gradients_of_a_host_tensor_add_up_on_the_host_between_teams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers_module, "parcels", lambda *_: [Parcel("table", 0, 0), Parcel("table", 0, 1)])
    mesh = Mesh(1, (0, 1), members=2)

    def talk(communicator: Communicator, _: Any) -> None:
        messenger, rank = Messenger(communicator, DEVICE), communicator.rank
        routes, links = {(0, 1): ("table",)}, {(0, 1): True}
        transfers = StageTransfers(routes, links, mesh, messenger, rank, lambda *_: None)
        if rank == 0:
            transfers.stash_output(Action.parse("0F0"), {"table": torch.ones(3, requires_grad=True)})
            transfers.send_forward(Action.parse("0SEND_F0>1"), (1, 3, 8, 8))
            transfers.recv_backward(Action.parse("0RECV_B0<1"))
            (gradient,) = transfers.wait_backward(Action.parse("0B0"))["table"]
            assert gradient.tolist() == [5, 5, 5]
        elif rank > 1:
            transfers.recv_forward(Action.parse("1RECV_F0<0"), (1, 3, 8, 8))
            transfers.wait_forward(Action.parse("1F0"))
            transfers.stash_gradients(Action.parse("1B0"), {"table": [torch.full((3,), float(rank))]})
            transfers.send_backward(Action.parse("1SEND_B0>0"))
        messenger.finish()

    run_on_threads(4, talk, timeout_s=30)


def test_a_sum_of_gradients_changes_no_other_value_that_has_the_same_tensor() -> None:
    """Both terms of an addition are given one tensor."""
    transfers = StageTransfers(
        {(0, 1): ("left", "right"), (0, 2): ("left",)},
        {(0, 1): True, (0, 2): True},
        Mesh(1, (0, 0, 0)),
        Messenger(LocalCommunicator(), CPU),
        rank=0,
    )
    values = {name: torch.ones(2, requires_grad=True) for name in ("left", "right")}
    transfers.stash_output(Action.parse("0F0"), values)
    shared = torch.ones(2)
    transfers.stash_gradients(Action.parse("1B0"), {"left": [shared], "right": [shared]})
    transfers.stash_gradients(Action.parse("2B0"), {"left": [torch.ones(2)]})
    found = transfers.wait_backward(Action.parse("0B0"))
    assert {name: gradient.tolist() for name, (gradient,) in found.items()} == {"left": [2, 2], "right": [1, 1]}


class Order:
    """Unpickled, it calls what it is made with."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call[0], self.call[1:]


def test_every_structure_of_plain_values_comes_through() -> None:
    one = torch.ones(2, 2)
    value = {
        "list": [one, (1, 2.5, None, "text", 1j, slice(1, 2))],
        "ordered": collections.OrderedDict(key=one),
        "default": collections.defaultdict(list, {1: one}),
        "deque": collections.deque([one]),
        "pair": Pair(one, one),
        "max": one.max(0),
        "torch": (torch.Size([1, 2]), torch.float16, torch.device("cpu"), torch.channels_last),
    }
    form, tensors = take_apart(value)
    told = load(dump(form, Form, TensorForm), Form, TensorForm)
    assert told == form
    assert [type(part) for part in told.build(tensors).values()] == [type(part) for part in value.values()]


@pytest.mark.parametrize(
    "call",
    [
        (os.mkdir, "{}"),
        (eval, "__import__('os').mkdir('{}')"),
        (functools.partial, os.mkdir, "{}"),
        (getattr, os, "mkdir"),
        (torch.load, "{}"),
    ],
    ids=lambda call: call[0].__name__,
)
def test_nothing_is_called_that_is_no_plain_type(call: tuple[Any, ...], tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    filled = [part.format(trace) if isinstance(part, str) else part for part in call if part is not os]
    data = pickle.dumps([Order(*filled)])
    with pytest.raises(UnknownTypeError, match="is not plain data"):
        load(data)
    assert not trace.exists()


def test_a_header_of_a_stranger_runs_nothing(tmp_path: Path) -> None:
    trace = tmp_path / "ran"

    def talk(communicator: Communicator, _: Any) -> None:
        if communicator.rank == 0:
            header = torch.frombuffer(bytearray(pickle.dumps(Order(os.mkdir, str(trace)))), dtype=torch.uint8)
            for tensor in (torch.tensor([header.numel()]), header):
                communicator.isend(tensor, 1, 0).wait()
        else:
            with pytest.raises(UnknownTypeError, match=r"mkdir is not plain data"):
                Messenger(communicator, torch.device("cpu")).post(0, "values").wait()

    run_on_threads(2, talk, timeout_s=30)
    assert not trace.exists()
