"""What is timed of copies, operations and messages gives back the seconds it was read from, is kept, and timed anew."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import run_on_threads
from parallel.cost.cluster import Cluster
from parallel.cost.stage_cost import LayerCost
from parallel.plan.added_costs import Halo, HaloTraffic, Sum, sum_in_team_s, with_traffic
from parallel.plan.step_time import step_time
from parallel.profile import link_speed, link_worker, op_timing
from parallel.profile.link_speed import (
    COPIES,
    FORMAT,
    SIZE,
    CopySpeed,
    LinkSpeed,
    load_or_measure_copies,
    load_or_measure_links,
    measure_copies,
    measure_links,
    speed_of,
)
from parallel.profile.link_worker import MEMBER_LAYERS, MemberPass
from parallel.profile.op_timing import LEAST_RUNS, LEAST_S, MOVING, SIDE_BY_SIDE, Moving, Setting, time_moving
from parallel.schedule.timeline import StageCost
from parallel.strategy import Strategy
from tests.helpers.lanes import long_where
from tests.helpers.sim_gpu import simulated
from tests.helpers.sim_gpu.ranks import run_ranks

CPU = torch.device("cpu")


def test_a_copy_in_memory_is_timed_by_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_speed, "SIZE", SIZE // 16)
    assert len(link_speed._in_memory(2)) == 2 * COPIES
    threads = torch.get_num_threads()
    found = measure_copies(CPU, threads=1, together=2)
    assert torch.get_num_threads() == threads
    assert found.to_host == found.to_device
    assert 1e7 < found.bandwidth < 1e13  # bytes a second, and not megabytes or bits


def test_a_speed_is_kept_by_threads_and_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = []

    def measure(device: torch.device, *, threads: int, together: int) -> CopySpeed:
        asked.append((threads, together))
        return CopySpeed(1e9 * together, 2e9)

    monkeypatch.setattr(link_speed, "measure_copies", measure)
    first = load_or_measure_copies(CPU, threads=2)
    assert load_or_measure_copies(CPU, threads=2) == first
    assert load_or_measure_copies(CPU, threads=1, together=2).to_host == 2e9
    assert asked == [(2, 1), (1, 2)]
    assert CopySpeed(2.0, 6.0).bandwidth == pytest.approx(3.0)  # 1/2 s and 1/6 s for two bytes


@pytest.mark.parametrize(("device", "at_once"), [("cpu", 1), ("meta", SIDE_BY_SIDE)])
def test_runs_between_two_readings_of_the_clock(device: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()
    begun: list[int] = []  # by the clock

    def clock() -> float:
        return float(next(seconds))

    def relu(images: Tensor) -> Tensor:
        begun.append(len(reads))
        return torch.relu(images)

    reads: list[float] = []
    monkeypatch.setitem(MOVING, "relu", Moving(relu))
    monkeypatch.setattr(op_timing, "now", lambda setting: reads.append(clock()) or reads[-1])
    monkeypatch.setattr(op_timing, "empty_backward_s", op_timing.empty_backward_s.__wrapped__)  # by this clock alone
    setting = Setting(torch.device(device))
    _, reading = time_moving("relu", torch.ones(1, 2, 3, 3, device=device), setting)
    timed = [read for read in dict.fromkeys(begun) if read % 4 == 1]  # of four readings, after the first
    assert [begun.count(read) for read in timed] == [at_once] * (LEAST_RUNS + 1)
    assert {begun.count(read) for read in begun if read % 4 != 1} == {1}  # each pass runs on other tensors first
    assert reading.forward_s == 1 / at_once
    assert reading.input_s == LEAST_S  # as long as an empty one by this clock


@pytest.mark.parametrize("name", MOVING)
def test_every_operation_runs_side_by_side(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_timing, "LEAST_RUNS", 1)
    monkeypatch.setattr(op_timing, "MOST_RUNS", 1)
    setting = Setting(torch.device("meta"))
    op, reading = time_moving(name, setting.tensor(1, 8, 4, 4), setting)
    assert op.name == name
    assert reading.forward_s > 0


SPEED = LinkSpeed(4e9, 1e-4, 1e9, 3e-4, 2.5, 6.0, 1e-3)
SUMMED = 30_000_000


def seconds(**changed: float) -> dict[str, float]:
    known = {"empty_message": 0.001, "message": 0.005, "empty_sum": 0.006, "sum": 0.046}
    known |= {"alone": 0.2, "replicated": 0.3, "sharded": 0.8}
    known |= {"member": 0.036, "member_alone": 0.006, "exchanges": 20}
    return known | {"message_bytes": 16e6, "sum_bytes": SUMMED, "net_bytes": SUMMED} | changed


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_plan_forecasts_the_seconds_that_were_measured(ranks: int) -> None:
    speed = speed_of(seconds(), ranks)
    assert (speed.message_bandwidth, speed.message_s) == (pytest.approx(4e9), 0.001)
    cluster = Cluster("test", 1 << 40, ranks, ranks, speed.messages, speed.messages, 1e30, "cpu", speed.sums)
    cluster = dataclasses.replace(cluster, beside_backward=speed.beside_backward, gathering=speed.gathering)
    assert cluster.sum_s(SUMMED, range(ranks)) == pytest.approx(0.046)
    assert cluster.sum_s(0, range(ranks)) == pytest.approx(0.006)
    ddp, fsdp = (
        step_time(
            Strategy(name, ranks, 1, ranks), ranks, [StageCost(0.1, 0.1, 0.05, 0.05, 0)], {}, [SUMMED], 0, cluster
        ).step_s
        for name in ("ddp", "fsdp")
    )
    assert (ddp, fsdp) == (pytest.approx(0.3), pytest.approx(0.8))
    speed = speed_of(seconds(replicated=0.19, sharded=0.1), ranks)  # not slower beside a backward pass
    assert (speed.beside_backward, speed.gathering) == (0.0, 0.0)


def test_a_pass_counts_its_exchanges() -> None:
    def passes(communicator: Communicator, _: None) -> list[int]:
        member = MemberPass(communicator)
        member.without_team()
        return [member.in_team(), member.in_team()]

    # Moments and their gradients at each norm, the pool's sum and its gradient, halos of each convolution and their
    # gradients, except those of the tile.
    assert run_on_threads(2, passes, [None, None]) == [[4 * MEMBER_LAYERS + 1] * 2] * 2


def test_members_that_compute_wait_as_long_for_each_other_as_was_measured() -> None:
    speed = speed_of(seconds(), 2)
    cluster = Cluster("test", 1 << 40, 2, 2, speed.messages, speed.messages, 1e30, "cpu", inside_team=speed.in_team)
    assert sum_in_team_s(Sum(4000), 2, cluster) == pytest.approx(0.0015 + 1e-6)
    assert sum_in_team_s(Sum(4000), 4, dataclasses.replace(cluster, per_node=4)) == pytest.approx(0.003 + 3e-6)
    talk = HaloTraffic([Halo(4_000_000, 8_000_000, 1, back=False)])
    told = with_traffic(LayerCost(0.006, 0.012, 0.006), talk, 1, 2, cluster)
    assert (told.forward_s, told.backward_s) == (pytest.approx(0.0085), 0.012)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gpus_measure_messages_sums_and_what_nccl_allocates(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On threads; each reading of the free memory finds 40 MiB less of it."""
    free = itertools.count(0, -40 << 20)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 0))
    monkeypatch.setattr(link_worker, "GPU_BYTES", 4096)
    measured = run_on_threads(ranks, lambda rank, _: link_worker.measure_gpus(rank, CPU, 2))
    assert measured[1:] == [None] * (ranks - 1)
    speed = speed_of(measured[0], ranks)
    assert min(speed.message_s, speed.message_bandwidth, speed.sum_bandwidth) > 0
    assert speed.link_bytes >= (10 << 20)
    assert speed.communicator_bytes >= (40 << 20)
    assert (speed.beside_backward, speed.gathering) == (1.0, 1.0)


@pytest.mark.parametrize(("ranks", "count"), long_where([(2, 2), (3, 3), (4, 2)], (2, 2)))
def test_gpus_talk_over_nccl_and_over_gloo_where_they_are_shared(
    ranks: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_worker, "GPU_BYTES", 4096)
    with simulated(count, late=0) as gpus:
        found, *others = run_ranks(
            gpus, ranks, lambda rank: link_worker.measure_gpus(rank, torch.device("cuda", rank.rank % count), 1)
        )
        assert not gpus.found
    assert others == [None] * (ranks - 1)
    assert all(found[name] > 0 for name in ("empty_message", "message", "empty_sum", "sum"))


def test_a_speed_between_ranks_is_kept_by_ranks_threads_and_format(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[int, int]] = []

    def measure(ranks: int, *, threads: int, device: str) -> LinkSpeed:
        assert device == "cpu"
        asked.append((ranks, threads))
        return dataclasses.replace(SPEED, message_s=ranks * 1e-4)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(link_speed, "measure_links", measure)
    speed = load_or_measure_links(2)
    assert load_or_measure_links(2) == speed
    assert load_or_measure_links(4).message_s == pytest.approx(4e-4)
    assert load_or_measure_links(2, threads=2) == speed
    assert asked == [(2, 1), (4, 1), (2, 2)]
    assert [path.name[:6] for path in (tmp_path / "megatile").iterdir()] == ["links-"] * 3
    monkeypatch.setattr(link_speed, "FORMAT", FORMAT + 1)
    assert load_or_measure_links(2) == speed
    assert len(asked) == 4


def test_ranks_that_fail_are_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(*_: Any, **__: Any) -> None:
        raise subprocess.CalledProcessError(1, [], stderr="a trace\nno way to the other rank\n")

    monkeypatch.setattr(subprocess, "run", failed)
    with pytest.raises(RuntimeError, match=r"how fast 2 ranks of this machine talk .* said: no way to the other rank"):
        measure_links(2)


@pytest.mark.process
def test_ranks_of_this_machine() -> None:
    speed = measure_links(2, rounds=2)
    for bandwidth in (speed.sum_bandwidth, speed.message_bandwidth):
        assert 1e7 < bandwidth < 1e13  # bytes a second, and not megabytes or bits
    assert all(0 < seconds < 1 for seconds in (speed.message_s, speed.sum_s))
    assert 0 <= speed.told_s < 1
    assert all(0 <= factor < 1000 for factor in (speed.beside_backward, speed.gathering))
