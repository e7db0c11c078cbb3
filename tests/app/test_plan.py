"""``app.plan``: the table and the files, wrong input, and what it says when nothing fits."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from app.launch.host import usable_cores
from app.plan import main
from app.planning.machine import _calibrated, named_machine, this_machine
from app.planning.table import print_largest, print_rows
from parallel.cost.calibrated import CostModel, Curve
from parallel.plan.candidates import BOXES, PLAIN
from parallel.plan.largest_tile import LIMIT, LargestTile
from parallel.plan.plan import Plan, PlanRow
from parallel.profile.calibrate import DeviceUse
from parallel.profile.link_speed import CopySpeed, LinkSpeed
from parallel.strategy import Strategy

V100 = ("--device-spec", "v100-16gb")
GIB = 1 << 30


def test_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--model", "resnet18", "--tile", "256", "--ranks", "4", "--batch", "8", *V100, "--out", str(tmp_path))
    assert main(asked) == 0
    printed = capsys.readouterr().out
    rows = json.loads((tmp_path / "candidates.json").read_text())["rows"]
    names = {row["strategy"] for row in rows}
    assert {"ddp", "fsdp", "mp-basic", "gpipe", "1f1b", "zero-bubble", "mast", "master", "bidirectional"} <= names
    assert all(name in printed for name in names)
    plan = Plan.loads((tmp_path / "plan.json").read_text())
    best = max(row["images_per_second"] for row in rows if row["fits"])
    assert plan.row.images_per_second is not None
    assert plan.row.images_per_second >= 0.99 * best
    assert plan.problem["ranks"] == 4
    assert "<- plan" in printed
    members = [eval((row["grid"] or "1x1").replace("x", "*")) for row in rows]
    assert all(len(row["peak_memory_bytes"]) == row["depth"] * n for row, n in zip(rows, members, strict=True))
    assert (tmp_path / "graph.svg").read_text().startswith("<svg")
    assert "layer1" in (tmp_path / "graph.txt").read_text()


def test_a_split_is_drawn(tmp_path: Path) -> None:
    asked = ("--model", "resnet18", "--tile", "256", "--ranks", "2", "--parallel", "1f1b", "--microbatches", "4")
    assert main((*asked, *V100, "--out", str(tmp_path))) == 0
    plan = Plan.loads((tmp_path / "plan.json").read_text())
    assert (plan.row.strategy.name, plan.row.strategy.m, len(plan.row.strategy.cuts)) == ("1f1b", 4, 1)
    assert "0F0" in (tmp_path / "schedule.csv").read_text()
    assert "simulated" in (tmp_path / "schedule.svg").read_text()
    assert json.loads((tmp_path / "graph.json").read_text())


def test_delayed_gradients_are_planned_by_name_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ("--model", "tests.helpers.tiny_models:top_heavy", "--tile", "64", "--ranks", "4", "--batch", "32", *V100)
    assert main((*model, "--parallel", "pipedream", "--microbatches", "32", "--out", str(tmp_path))) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "pipedream: delayed gradients, not the plain step" in printed
    assert "pipedream sends less below" in printed
    rows = json.loads((tmp_path / "candidates.json").read_text())["rows"]
    assert {(row["strategy"], row["depth"], row["m"]) for row in rows} == {("pipedream", 4, 32)}
    assert "3U31" in (tmp_path / "schedule.csv").read_text()
    main(model)
    assert "pipedream" not in capsys.readouterr().out


def test_too_little_memory_for_anything_says_the_least(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--model", "resnet18", "--tile", "512", "--ranks", "2", "--memory", "64MiB", *V100)
    assert main(asked) == 1
    printed = capsys.readouterr().out
    assert "nothing fits in 64 MiB a rank" in printed
    assert "needs least" in printed
    assert "over" in printed


@pytest.mark.long
def test_the_largest_tile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--model", "resnet18", "--tile", "256", "--ranks", "2", "--parallel", "1f1b", "--memory", "1GiB")
    assert main((*asked, *V100, "--largest-tile", "--out", str(tmp_path))) == 0
    rows = json.loads((tmp_path / "largest_tile.json").read_text())["rows"]
    assert all(row["row"]["fits"] for row in rows)
    split = [row for row in rows if row["strategy"] == "1f1b"]
    assert [row["tile_px"] for row in split] == sorted({row["tile_px"] for row in split})  # each gains something
    plain, *_, moved = split
    whole = [row["tile_px"] for row in rows if row["strategy"] == "single" and not row["row"]["stream_px"]]
    assert moved["tile_px"] > max(whole) > 256
    assert max(row["tile_px"] for row in rows if row["row"]["stream_px"]) > 4 * max(whole)
    assert (plain["row"]["recompute"], plain["row"]["offload"]) == ("none", False)
    assert moved["row"]["offload"]
    assert moved["tile_px"] > 1.3 * plain["tile_px"]
    assert plain["limit_of_double"].startswith("activations kept")
    assert moved["limit_of_double"].startswith("working set of ")
    printed = capsys.readouterr().out
    assert "largest tile within 1 GiB and 128 GiB of host memory a rank" in printed
    assert all(row["row"]["host_bytes"] <= 128 * GIB for row in rows)
    assert max(row["row"]["host_bytes"] for row in rows) > 0.9 * 128 * GIB
    assert moved["limit_of_double"] in printed


def test_what_is_saved_can_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--model", "resnet18", "--tile", "256", "--ranks", "2", *V100, "--out", str(tmp_path))
    assert main((*asked, "--recompute", "block", "--offload", "overlap", "--batch", "4")) == 0
    rows = json.loads((tmp_path / "candidates.json").read_text())["rows"]
    assert {(row["recompute"], row["offload"]) for row in rows if not row["refused"]} == {("block", True)}
    assert {row["strategy"] for row in rows if row["refused"]} == {"fsdp", "zero-bubble"}
    assert "+recompute block +offload" in capsys.readouterr().out
    tight = ("--model", "resnet18", "--tile", "512", "--ranks", "1", "--memory", "840MiB", "--batch", "1", *V100)
    assert main((*tight, "--recompute", "none", "--offload", "none", "--host-memory", "1KiB")) == 1
    assert main((*tight, "--offload", "overlap", "--host-memory", "1KiB")) == 1
    assert main(tight) == 0


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (("--device-spec", "v100-16g"), "v100-16gb"),
        (("--host-memory", "lots"), "--host-memory takes a size"),
        (("--ranks", "0"), "--ranks must be at least 1; got 0"),
        (("--memory", "16G"), "--memory takes a size"),
        (("--tile", "0"), "--tile must be at least 1"),
        ((*V100, "--ranks", "4", "--stages", "3"), "divide --ranks 4"),
        ((*V100, "--link", "nvlink9"), "nvlink4"),
        ((*V100, "--model", "resnet19x"), "resnet"),
        ((*V100, "--precision", "bf16"), "bfloat16"),
        (("--precision", "fp16"), "--precision fp16 is for --device-spec"),
        (("--precision", "tf32"), "--precision tf32 needs a GPU"),
        (("--link", "nvlink2"), "--device-spec"),
        (("--network", "ndr-infiniband"), "--network is about a machine described by --device-spec"),
    ],
)
def test_wrong_input_is_named(asked: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("--model", "resnet18", "--tile", "64", *asked)) == 2
    assert says in capsys.readouterr().err


@pytest.fixture
def known_speeds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of this machine, as if they had just been measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    curve = Curve((1.0, 1e6), (1e-9, 1e-3))
    model = CostModel({}, {}, {"add": curve}, {"add": curve}, curve, 0.1, 1.0)
    monkeypatch.setattr("app.planning.machine.load_or_calibrate", lambda *args, **settings: model)
    monkeypatch.setattr("app.planning.machine.load_or_measure_copies", lambda *args, **settings: CopySpeed(1e10, 1e10))
    monkeypatch.setattr(
        "app.planning.machine.load_or_measure_links",
        lambda ranks, **settings: LinkSpeed(ranks * 1e9, 2e-4, 3e8, 4e-4, 1.5, 4.5, 1e-3),
    )


@pytest.mark.usefixtures("known_speeds")
def test_links_and_sums_of_this_machine_are_those_measured_on_it(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = this_machine(2, device="cpu").cluster
    assert cluster.inside.bandwidth == 2e9
    assert cluster.inside.latency_s == 2e-4
    assert cluster.sum_s(300_000_000, [0, 1]) == pytest.approx(1 + 2 * 4e-4)
    assert (cluster.beside_backward, cluster.gathering) == (1.5, 4.5)
    assert "measuring messages and sums between 2 ranks of this machine" in capsys.readouterr().err
    many = this_machine(1000, device="cpu").cluster
    assert many.inside.bandwidth == 2 * usable_cores() * 1e9  # no thousand ranks are started to know how they talk


@pytest.mark.parametrize(("memory", "host"), [(2 * GIB, 16 * GIB), (24 * GIB, 8 * GIB), (40 * GIB, 0)])
def test_ranks_of_this_machine_share_half_of_its_free_memory(
    memory: int, host: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As much as a run fills with what it moves to the host, and on a CPU no more than the limit leaves."""
    monkeypatch.setattr("app.planning.machine.memory_bytes", lambda: (128 * GIB, 64 * GIB))
    cluster = this_machine(2, memory=memory, device="cpu", timed=False).cluster
    assert cluster.host_bytes == host
    assert this_machine(2, memory=memory, host_memory=GIB, device="cpu", timed=False).cluster.host_bytes == GIB


@pytest.mark.usefixtures("known_speeds")
def test_one_rank_talks_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("app.planning.machine.load_or_measure_links")
    assert this_machine(1, device="cpu").cluster.sums is None


@pytest.mark.parametrize(
    ("device", "precision"), [("v100-16gb", "fp32"), ("a100-80gb", "bf16"), ("a100-80gb:1,v100-16gb:1", "fp32")]
)
def test_the_precision_of_a_plan_is_that_of_training(device: str, precision: str) -> None:
    machine = named_machine(device, 1 + device.count(","))
    assert machine.precision == precision
    assert (machine.autocast is not None) == (precision == "bf16")


@pytest.mark.parametrize(
    ("precision", "dtype", "tf32"),
    [("fp32", torch.float32, False), ("tf32", torch.float32, True), ("bf16", torch.bfloat16, False)],
)
def test_each_precision_has_a_calibration_of_its_own(
    precision: str, dtype: torch.dtype, tf32: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[DeviceUse] = []
    monkeypatch.setattr("parallel.profile.calibrate.gpu_at", lambda index: SimpleNamespace(name="NVIDIA A100"))
    monkeypatch.setattr("app.planning.machine.load_or_calibrate", asked.append)
    _calibrated(torch.device("cuda", 0), 1, 1, precision, True)
    assert (asked[0].dtype, asked[0].tf32) == (dtype, tf32)


@pytest.mark.parametrize(
    ("ranks", "per_node", "host_gib"), [(1, None, 256), (4, None, 64), (1024, None, 32), (8, 2, 128)]
)
def test_nodes_of_a_data_sheet_share_256_gib(ranks: int, per_node: int | None, host_gib: int) -> None:
    assert named_machine("v100-16gb", ranks, per_node=per_node).cluster.host_bytes == host_gib * GIB
    assert named_machine("v100-16gb", ranks, host_memory=5 * GIB).cluster.host_bytes == 5 * GIB


def test_rows_of_largest_tiles(capsys: pytest.CaptureFixture[str]) -> None:
    def found(name: str, tile: int, step_s: float, host_gib: int, next_row: PlanRow | None = None) -> LargestTile:
        strategy = Strategy(name, 1, 1, 8)
        row = PlanRow(strategy, 8 / step_s, step_s, 0.0, (2 * GIB,), host_bytes=host_gib * GIB)
        return LargestTile(name, BOXES, tile, row, next_row)

    on_device = PlanRow(Strategy("ddp", 1, 1, 8), peak_bytes=(20 * GIB,), over_bytes=5 * GIB)
    on_host = PlanRow(Strategy("ddp", 1, 1, 8), peak_bytes=(2 * GIB,), over_bytes=3 * GIB, host_bytes=67 * GIB)
    tiles = [
        found("fsdp", 1024, 2.0, 0, on_device),
        found("single", LIMIT, 7200.0, 60),
        found("ddp", 4096, 3599.0, 63, on_host),
        LargestTile("gpipe", PLAIN, 0, None, on_device),
    ]
    print_largest(tiles, ["a limit"] * 4, named_machine("v100-16gb", 4).cluster)
    printed = capsys.readouterr().out
    rows = {line.split()[0]: line for line in printed.splitlines()[3:] if line}
    assert list(rows)[:4] == ["ddp", "fsdp", "gpipe", "single"]  # the one that takes hours is last
    assert "7200 !" in rows["single"]
    assert "an hour" in printed
    assert str(LIMIT) in rows["single"].partition("search")[2]
    assert "!" not in rows["ddp"]
    assert "63 GiB" in rows["ddp"]
    assert "3 GiB over on the host" in rows["ddp"]
    assert "on the host" not in rows["fsdp"]
    print_largest(tiles[:1], [""], named_machine("v100-16gb", 4).cluster)
    assert "hour" not in capsys.readouterr().out


def test_the_plan_stands_before_what_is_hardly_faster(capsys: pytest.CaptureFixture[str]) -> None:
    slower, faster = (PlanRow(Strategy(name, 2, 1, 2), speed) for name, speed in (("ddp", 10.0), ("fsdp", 10.05)))
    print_rows([slower, faster], slower)
    printed = capsys.readouterr().out
    assert printed.index("ddp") < printed.index("fsdp")
