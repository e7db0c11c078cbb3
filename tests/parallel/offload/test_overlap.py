"""Offload's rules, no copy is used before it is done; whatever is offloaded, every schedule gives the plain step."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

from parallel.memory.policy import ActivationPolicy, buffer_bytes
from parallel.offload.copies import Copies, CudaCopies, Mark
from parallel.offload.host_memory import HostMemory
from parallel.offload.overlap import MicrobatchSaves, OverlapOffload
from parallel.offload.packing import ActivationMeter
from parallel.strategy import Strategy
from tests.helpers.engine_runs import assert_plain, strategy_for
from tests.helpers.lanes import long_where
from tests.helpers.sim_gpu import simulated
from tests.helpers.small_nets import NETS

KIB = 1024
NUMBERS = KIB // 4


def tensors(count: int) -> list[torch.Tensor]:
    return [torch.full((NUMBERS,), float(k)) for k in range(count)]


def offload(copies: Copies | None = None, **more: Any) -> tuple[MicrobatchSaves, ActivationMeter]:
    meter, copies = ActivationMeter(), copies or Copies()
    moves = OverlapOffload(copies, HostMemory(copies, more.pop("budget", None)), meter=meter, **more)
    return MicrobatchSaves(moves), meter


def test_what_waits_stays_within_the_window_and_the_oldest_leaves_first() -> None:
    saves, meter = offload(ahead=2 * KIB)
    packed = [saves.pack(tensor) for tensor in tensors(5)]
    assert meter.bytes == 2 * KIB
    assert saves.offload.pool.bytes == 3 * buffer_bytes(KIB)
    assert [storage.saved is None for storage in saves.storages] == [True, True, True, False, False]
    for k in reversed(range(5)):
        assert packed.pop().unpack().eq(k).all()
        assert meter.bytes <= 2 * KIB  # what is asked for makes room for what comes ahead
    gc.collect()
    assert (meter.bytes, saves.offload.pool.bytes) == (0, 0)


def test_what_comes_ahead_is_what_was_kept_just_before() -> None:
    saves, meter = offload(ahead=2 * KIB)
    packed = [saves.pack(tensor) for tensor in tensors(6)]
    saves.offload.flush(saves)
    assert meter.bytes == 0
    saves.offload.prefetch(saves)
    assert [storage.saved is not None for storage in saves.storages] == [False] * 4 + [True] * 2
    packed[5].unpack()
    assert [storage.saved is not None for storage in saves.storages] == [False] * 3 + [True] * 3


def test_one_storage_travels_once_for_all_that_share_it() -> None:
    saves, meter = offload()
    whole = torch.arange(float(NUMBERS))
    packed = [saves.pack(whole), saves.pack(whole.view(16, -1)), saves.pack(whole[: NUMBERS // 2])]
    assert len(saves.storages) == 1
    assert saves.offload.pool.bytes == buffer_bytes(KIB)
    assert [tuple(each.unpack().shape) for each in packed] == [(NUMBERS,), (16, NUMBERS // 16), (NUMBERS // 2,)]
    assert torch.equal(packed[1].unpack(), whole.view(16, -1))
    assert meter.peak_bytes == KIB


def test_small_tensors_and_small_parts_of_large_storages_are_left() -> None:
    saves, meter = offload(smallest=2 * KIB)
    small, large = torch.zeros(NUMBERS), torch.zeros(8 * NUMBERS)
    kept = [saves.pack(small), saves.pack(large[:NUMBERS])]
    assert not saves.storages
    assert meter.bytes == 9 * KIB
    assert kept[1].unpack().data_ptr() == large.data_ptr()


def test_conjugate_and_negative_views_come_back_as_they_were() -> None:
    saves, _ = offload()
    whole = torch.full((NUMBERS,), 1 + 2j)
    packed = [saves.pack(view) for view in (whole, whole.conj(), whole.conj().imag)]
    assert len(saves.storages) == 1
    assert [packed[k].unpack()[0].item() for k in range(3)] == [1 + 2j, 1 - 2j, -2]


def test_what_the_host_has_no_room_for_stays() -> None:
    saves, meter = offload(budget=2 * buffer_bytes(KIB))
    packed = [saves.pack(tensor) for tensor in tensors(4)]
    assert saves.offload.pool.taken_bytes == 2 * buffer_bytes(KIB)
    assert meter.bytes == 2 * KIB
    assert all(each.unpack().eq(k).all() for k, each in enumerate(packed))


def test_freed_memory_that_is_given_out_again_is_another_storage() -> None:
    saves, _ = offload()
    packed = []
    for k in range(50):
        packed.append(saves.pack(torch.full((NUMBERS,), float(k))))  # freed at once, and its place used anew
    assert len(saves.storages) == 50
    assert all(each.unpack().eq(k).all() for k, each in enumerate(packed))


def test_a_change_in_place_is_an_error_until_the_tensor_has_left() -> None:
    for ahead in (4 * KIB, 0):
        saves, _ = offload(ahead=ahead)
        tensor = torch.zeros(NUMBERS)
        packed = [saves.pack(tensor)]
        tensor += 1
        if ahead:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                packed[0].unpack()
            continue
        packed.append(saves.pack(tensor))
        assert packed[0].unpack().eq(0).all()
        assert packed[1].unpack().eq(1).all()


def test_a_step_that_is_given_up_frees_nothing_that_is_still_copied() -> None:
    with simulated(1, late=0) as gpus:
        gpu = torch.device("cuda", 0)
        saves, meter = offload(CudaCopies(gpu), ahead=4 * KIB)
        packed = [saves.pack(tensor.to(gpu)) for tensor in tensors(6)]
        moves = saves.offload
        moves.flush(saves)
        moves.prefetch(saves)
        del packed, saves
        gc.collect()
        assert gpus.found == []
    assert (meter.bytes, moves.pool.bytes) == (0, 0)


class Logged(Copies):
    """Copies of a GPU that write down, in the order of the computing stream, what begins and what is waited for."""

    pinned = True

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Any] = []

    def to_host(self, source: torch.Tensor, into: torch.Tensor) -> Mark:
        super().to_host(source, into)
        return self._begun()

    def to_device(self, source: torch.Tensor) -> tuple[torch.Tensor, Mark]:
        return super().to_device(source)[0], self._begun()

    def wait(self, mark: Mark) -> None:
        self.log.append(("wait", mark))

    def _begun(self) -> Mark:
        self.log.append(object())
        return self.log[-1]

    def serial(self) -> int:
        """Return the copies between whose begin and first wait nothing is computed."""
        marks = [mark for mark in self.log if type(mark) is object]
        waits = [(mark, self.log.index(("wait", mark))) for mark in marks if ("wait", mark) in self.log]
        return sum("computed" not in self.log[self.log.index(mark) : at] for mark, at in waits)


@pytest.mark.parametrize(
    ("size", "ahead", "most"),
    [(64, None, 128), (300, None, 600), (300, 256, 600), (300, 1, 600), (300, 600, 600), (300, 1200, 1200)],
)
def test_copies_run_while_something_is_computed_whatever_the_size(size: int, ahead: int | None, most: int) -> None:
    copies = Logged()
    saves, meter = offload(copies, ahead=ahead)
    packed = []
    for k in range(6):
        packed.append(saves.pack(torch.full((size // 4,), float(k))))
        assert meter.bytes <= most
        copies.log.append("computed")
    for k in reversed(range(6)):
        assert packed.pop().unpack().eq(k).all()
        copies.log.append("computed")
    assert saves.offload.pool.peak_bytes
    assert copies.serial() == 0


def test_a_window_of_nothing_waits_for_each_copy() -> None:
    copies = Logged()
    saves, meter = offload(copies, ahead=0)
    packed = saves.pack(torch.zeros(NUMBERS))
    assert meter.bytes == 0
    assert packed.unpack().eq(0).all()
    assert copies.serial() == 2


POLICIES = {
    "overlap": ActivationPolicy(offload="overlap", smallest=0),
    "overlap, ahead": ActivationPolicy(offload="overlap", smallest=512, ahead=20_000),
    "overlap, little room": ActivationPolicy(offload="overlap", smallest=0, host_bytes=40_000),
    "block": ActivationPolicy(recompute="block"),
    "block and overlap": ActivationPolicy(recompute="block", offload="overlap", smallest=0),
    "block and overlap, ahead": ActivationPolicy(recompute="block", offload="overlap", smallest=0, ahead=20_000),
    "stage and overlap": ActivationPolicy(recompute="stage", offload="overlap", smallest=0),
    "optimizer": ActivationPolicy(optimizer=True),
    "parameters": ActivationPolicy(parameters=True),
    "parameters, block": ActivationPolicy(parameters=True, recompute="block"),
    "parameters, stage": ActivationPolicy(parameters=True, recompute="stage"),
    "all": ActivationPolicy(parameters=True, recompute="block", offload="overlap", smallest=0),
    "parameters, overlap": ActivationPolicy(parameters=True, offload="overlap", smallest=0),
}

OF_TWO = ("all", "stage and overlap", "block and overlap")
"""Policies of two ways at once."""

WHOLE = {"single": Strategy("single", 1, 1, 4), "ddp": Strategy("ddp", 2, 1, 4)}
SCHEDULES = ("gpipe", "1f1b", "master", "bidirectional", *WHOLE)


def strategy_of(schedule: str, policy: ActivationPolicy) -> Strategy:
    return replace(WHOLE.get(schedule) or strategy_for(schedule, 2, m=4), policy=policy)


@pytest.mark.pairs
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("schedule", long_where(SCHEDULES, "gpipe", "master", "single"))
@pytest.mark.parametrize("name", NETS)
def test_schedules(name: str, schedule: str, policy: ActivationPolicy) -> None:
    assert_plain(name, strategy_of(schedule, policy))


@pytest.mark.parametrize(("schedule", "policy"), list(zip(("1f1b", "bidirectional", "ddp"), OF_TWO, strict=True)))
def test_complex_values(schedule: str, policy: str) -> None:
    assert_plain("fourier", strategy_of(schedule, POLICIES[policy]))
