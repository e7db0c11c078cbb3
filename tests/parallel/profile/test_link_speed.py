"""What is measured between ranks gives back the seconds it was read from, is kept, and measured anew when due."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import run_on_threads
from parallel.cost.cluster import Cluster
from parallel.cost.stage_cost import LayerCost
from parallel.plan.halo_traffic import Halo, HaloTraffic, Sum, sum_in_team_s, with_traffic
from parallel.plan.step_time import step_time
from parallel.profile import link_speed, link_worker
from parallel.profile.cache import keep, kept_text
from parallel.profile.link_speed import FORMAT, LinkSpeed, load_or_measure_links, measure_links, speed_of
from parallel.profile.link_worker import MEMBER_LAYERS, MemberPass
from parallel.schedule.timeline import StageCost
from parallel.strategy import Strategy
from tests.helpers.lanes import long_where
from tests.helpers.sim_gpu import simulated
from tests.helpers.sim_gpu.ranks import run_ranks

SPEED = LinkSpeed(4e9, 1e-4, 1e9, 3e-4, 2.5, 6.0, 1e-3)
SIZE = 30_000_000


def seconds(**changed: float) -> dict[str, float]:
    known = {"empty_message": 0.001, "message": 0.005, "empty_sum": 0.006, "sum": 0.046}
    known |= {"alone": 0.2, "replicated": 0.3, "sharded": 0.8}
    known |= {"member": 0.036, "member_alone": 0.006, "exchanges": 20}
    return known | {"message_bytes": 16e6, "sum_bytes": SIZE, "net_bytes": SIZE} | changed


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_plan_forecasts_the_seconds_that_were_measured(ranks: int) -> None:
    speed = speed_of(seconds(), ranks)
    assert (speed.message_bandwidth, speed.message_s) == (pytest.approx(4e9), 0.001)
    cluster = Cluster("test", 1 << 40, ranks, ranks, speed.messages, speed.messages, 1e30, "cpu", speed.sums)
    cluster = dataclasses.replace(cluster, beside_backward=speed.beside_backward, gathering=speed.gathering)
    assert cluster.sum_s(SIZE, range(ranks)) == pytest.approx(0.046)
    assert cluster.sum_s(0, range(ranks)) == pytest.approx(0.006)
    ddp, fsdp = (
        step_time(
            Strategy(name, ranks, 1, ranks), ranks, [StageCost(0.1, 0.1, 0.05, 0.05, 0)], {}, [SIZE], 0, cluster
        ).step_s
        for name in ("ddp", "fsdp")
    )
    assert (ddp, fsdp) == (pytest.approx(0.3), pytest.approx(0.8))


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
    cluster = Cluster("test", 1 << 40, 2, 2, speed.messages, speed.messages, 1e30, "cpu", told=speed.in_team)
    assert sum_in_team_s(Sum(4000), 2, cluster) == pytest.approx(0.0015 + 1e-6)
    assert sum_in_team_s(Sum(4000), 4, dataclasses.replace(cluster, per_node=4)) == pytest.approx(0.003 + 3e-6)
    talk = HaloTraffic([Halo(4_000_000, 8_000_000, 1, back=False)])
    told = with_traffic(LayerCost(0.006, 0.012, 0.006), talk, 1, 2, cluster)
    assert (told.forward_s, told.backward_s) == (pytest.approx(0.0085), 0.012)


def test_what_is_not_slower_beside_a_backward_pass_takes_nothing() -> None:
    speed = speed_of(seconds(replicated=0.19, sharded=0.1), 2)
    assert (speed.beside_backward, speed.gathering) == (0.0, 0.0)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gpus_measure_messages_sums_and_what_nccl_allocates(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On threads; each reading of the free memory finds 40 MiB less of it."""
    free = itertools.count(0, -40 << 20)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 0))
    monkeypatch.setattr(link_worker, "GPU_BYTES", 4096)
    measured = run_on_threads(ranks, lambda rank, _: link_worker.measure_gpus(rank, torch.device("cpu"), 2))
    assert measured[1:] == [None] * (ranks - 1)
    speed = speed_of(measured[0], ranks)
    assert speed.message_s > 0
    assert speed.message_bandwidth > 0
    assert speed.sum_bandwidth > 0
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


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[int, int]]:
    """(ranks, threads) of each measurement that is made."""
    found: list[tuple[int, int]] = []

    def measure(ranks: int, *, threads: int, device: str) -> LinkSpeed:
        assert device == "cpu"
        found.append((ranks, threads))
        return dataclasses.replace(SPEED, message_s=ranks * 1e-4)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(link_speed, "measure_links", measure)
    return found


def test_a_speed_is_kept_by_ranks_and_threads(asked: list[tuple[int, int]], tmp_path: Path) -> None:
    first = load_or_measure_links(2)
    assert load_or_measure_links(2) == first
    assert load_or_measure_links(4).message_s == pytest.approx(4e-4)
    assert load_or_measure_links(2, threads=2) == first
    assert asked == [(2, 1), (4, 1), (2, 2)]
    files = sorted((tmp_path / "megatile").iterdir())
    assert [file.name[:6] for file in files] == ["links-"] * 3


def test_one_of_another_version_is_measured_anew_and_told(
    asked: list[tuple[int, int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    speed = load_or_measure_links(2)
    (file,) = (tmp_path / "megatile").iterdir()
    kept = json.loads(kept_text(file))
    assert kept["format"] == FORMAT
    keep(file, json.dumps(kept | {"format": FORMAT - 1}))
    assert load_or_measure_links(2) == speed
    assert len(asked) == 2
    (record,) = caplog.records
    assert f"by another version (format {FORMAT - 1}, now {FORMAT}): measured anew" in record.getMessage()
    assert json.loads(kept_text(file)) == kept
    assert load_or_measure_links(2) == speed
    assert len(asked) == 2


def test_ranks_that_fail_are_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(*_: Any, **__: Any) -> None:
        raise subprocess.CalledProcessError(1, [], stderr="a trace\nno way to the other rank\n")

    monkeypatch.setattr(subprocess, "run", failed)
    with pytest.raises(RuntimeError, match=r"how fast 2 ranks of this machine talk .* said: no way to the other rank"):
        measure_links(2)


@pytest.mark.process
def test_ranks_of_this_machine() -> None:
    speed = measure_links(2, rounds=2)
    assert 1e7 < speed.sum_bandwidth < 1e13  # bytes a second, and not megabytes or bits
    assert 1e7 < speed.message_bandwidth < 1e13
    assert 0 < speed.message_s < 1
    assert 0 < speed.sum_s < 1
    assert 0 <= speed.told_s < 1
    assert 0 <= speed.beside_backward < 1000
    assert 0 <= speed.gathering < 1000
