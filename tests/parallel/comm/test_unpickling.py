"""Bytes of another process make plain data, or nothing."""

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
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.messages import Form, Messenger, TensorForm, take_apart
from tests.helpers.small_nets import Pair


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


def test_a_model_that_sends_an_object_is_told_so() -> None:
    def talk(communicator: Communicator, _: Any) -> None:
        if communicator.rank == 0:
            with pytest.raises(ValueError, match=r"between stages go tensors, .*Plain is not plain data: return such"):
                Messenger(communicator, torch.device("cpu")).send(1, "values", (torch.ones(1), Plain()))

    run_on_threads(2, talk, timeout_s=30)


class Plain:
    """An object of a user's own class."""
