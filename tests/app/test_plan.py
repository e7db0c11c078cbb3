"""``app.plan``: the table and the files, wrong input, and what it says when nothing fits."""

import dataclasses
import json
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from app.launch.host import usable_cores
from app.planning.machine import CUDA_CONTEXT, _calibrated, named_machine, this_machine
from app.planning.table import print_rows, what_tiles_need
from app.settings.cli import RunError
from parallel.cost.calibrated import CostModel, Curve
from parallel.plan.candidates import PLAIN
from parallel.plan.largest_tile import LargestTile
from parallel.plan.plan import Plan, PlanRow
from parallel.plan.search import Planner
from parallel.profile.link_speed import CopySpeed, LinkSpeed
from parallel.strategy import Strategy
from tests.helpers.in_process import call

GIB = 1 << 30


@pytest.fixture
def plan(tmp_path):
    """Plans for a V100: what is printed, and the candidates."""

    def plan(*words, model="resnet18", tile=256, ranks=2, code=0, out=tmp_path):
        asked = ("--model", model, "--tile", tile, "--ranks", ranks, "--device-spec", "v100-16gb", *words, "--out", out)
        printed = call("app.plan", *map(str, asked), code=code).stdout
        found = out / "candidates.json"
        return printed, json.loads(found.read_text())["rows"] if found.exists() else []

    return plan


def test_a_plan(plan, tmp_path):
    printed, rows = plan("--batch", "8", ranks=4)
    names = {row["strategy"] for row in rows}
    assert {"ddp", "fsdp", "mp-basic", "gpipe", "1f1b", "zero-bubble", "mast", "master", "bidirectional"} <= names
    assert all(name in printed for name in names)
    found = Plan.loads((tmp_path / "plan.json").read_text())
    assert found.row.images_per_second >= 0.99 * max(row["images_per_second"] for row in rows if row["fits"])
    assert found.problem["ranks"] == 4
    assert "<- plan" in printed
    members = [eval((row["grid"] or "1x1").replace("x", "*")) for row in rows]
    assert all(len(row["peak_memory_bytes"]) == row["depth"] * n for row, n in zip(rows, members, strict=True))
    assert (tmp_path / "graph.dot").read_text().startswith("digraph model {")
    assert "layer1" in (tmp_path / "graph.txt").read_text()


def test_a_split_is_drawn(plan, tmp_path):
    plan("--parallel", "1f1b", "--stages", "2", "--microbatches", "4", "--recompute", "stage", ranks=4)
    strategy = Plan.loads((tmp_path / "plan.json").read_text()).row.strategy
    assert (strategy.name, strategy.m, len(strategy.cuts)) == ("1f1b", 4, 1)
    by_file = dataclasses.replace(strategy, schedule_csv=(tmp_path / "schedule.csv").read_text())
    assert by_file.schedule({(0, 1): True}) == strategy.schedule({(0, 1): True})
    assert "simulated" in (tmp_path / "schedule.svg").read_text()
    graph = json.loads((tmp_path / "graph.json").read_text())
    assert graph["stages"][0]["sends"][0]["bytes"] == graph["cuts"][0]["bytes"]  # both of one tile


def test_delayed_gradients_are_planned_by_name_only(plan, tmp_path):
    asked = {"model": "tests.helpers.tiny_models:top_heavy", "tile": 64, "ranks": 4}
    printed, rows = plan("--batch", "32", "--parallel", "pipedream", "--microbatches", "32", **asked)
    printed = " ".join(printed.split())
    assert "pipedream: delayed gradients, not the plain step" in printed
    assert "pipedream sends less below" in printed
    assert {(row["strategy"], row["depth"], row["m"]) for row in rows} == {("pipedream", 4, 32)}
    assert "3U31" in (tmp_path / "schedule.csv").read_text()
    assert "pipedream" not in plan("--batch", "32", **asked, out=tmp_path / "auto")[0]


def test_too_little_memory_says_the_least_and_leaves_no_file_of_an_earlier_plan(plan, tmp_path):
    earlier = {"plan.json", "schedule.csv", "schedule.svg", "largest_tile.json"}
    for name in (*earlier, "notes.txt"):
        (tmp_path / name).write_text("earlier")
    printed, _ = plan("--memory", "64MiB", tile=512, code=1)
    for words in ("nothing fits in 64 MiB a rank", "needs least", "over"):
        assert words in printed
    left = {path.name for path in tmp_path.iterdir()}
    assert left & {*earlier, "notes.txt"} == {"notes.txt"}
    assert set(printed.strip().rpartition(": ")[2].split(", ")) == left - {"notes.txt"}


def test_where_no_strategy_can_run_the_plan_says_so():
    """``max`` over the lines of an empty table had said "max() arg is an empty sequence"."""
    asked = "--parallel ddp --ranks 4 --batch 2 --model resnet18 --tile 256 --device-spec v100-16gb"
    assert "no strategy can run: name another --parallel" in call("app.plan", *asked.split(), code=1).stdout


def test_the_largest_tile_is_of_the_stages_and_microbatches_that_are_asked_for(plan, tmp_path, monkeypatch):
    def largest(names, _, least):
        return [LargestTile(name, PLAIN, 256, least(256, name, PLAIN), None) for name in names]

    monkeypatch.setattr("app.planning.report.largest_tiles", largest)
    plan("--parallel", "1f1b", "--stages", "2", "--microbatches", "4", "--largest-tile", ranks=4)
    rows = [row["row"] for row in json.loads((tmp_path / "largest_tile.json").read_text())["rows"]]
    assert [(row["strategy"], row["depth"], row["m"]) for row in rows] == [("single", 1, 4), ("1f1b", 2, 4)]


def test_a_plan_without_the_slower_devices_keeps_precision_and_what_is_asked_for(plan, monkeypatch):
    """A40s without T4s had been planned in bf16, and compared with fp32."""
    searches = []

    def search(self, names, **asked):
        dtype = self.stages.microbatch(1)[1].source.split()[-1]
        searches.append((names, asked["depth"], asked["m"], dtype))
        return Planner.search(self, names, **asked)

    monkeypatch.setattr("app.planning.report.Planner", type("Spy", (Planner,), {"search": search}))
    asked = "--device-spec", "a40-48gb:2,t4-16gb:2", "--stages", "2", "--microbatches", "4"
    assert "without 2 x t4-16gb" in plan(*asked, ranks=4)[0]
    (_, *of_plan), (names, *of_fewer) = searches
    assert of_plan == of_fewer == [2, 4, "float32"]
    assert "subgraph" not in names


@pytest.mark.long
def test_the_largest_tile(plan, tmp_path):
    printed, _ = plan("--parallel", "1f1b", "--memory", "1GiB", "--largest-tile")
    rows = json.loads((tmp_path / "largest_tile.json").read_text())["rows"]
    assert all(row["row"]["fits"] for row in rows)
    split = [row for row in rows if row["strategy"] == "1f1b"]
    assert [row["tile_px"] for row in split] == sorted({row["tile_px"] for row in split})  # each gains something
    plain, *_, moved = split
    whole = [row["tile_px"] for row in rows if row["strategy"] == "single" and not row["row"]["stream_px"]]
    assert moved["tile_px"] > max(whole) > 256
    assert max(row["tile_px"] for row in rows if row["row"]["stream_px"]) > 4 * max(whole)
    assert (plain["row"]["recompute"], plain["row"]["offload"], moved["row"]["offload"]) == ("none", False, True)
    assert moved["tile_px"] > 1.3 * plain["tile_px"]
    assert plain["limit_of_double"].startswith("activations kept")
    assert moved["limit_of_double"].startswith("working set of ")
    assert "largest tile within 1 GiB and 128 GiB of host memory a rank" in printed
    assert moved["limit_of_double"] in printed
    assert 0.9 * 128 * GIB < max(row["row"]["host_bytes"] for row in rows) <= 128 * GIB


def test_what_is_saved_can_be_chosen(plan, tmp_path):
    printed, rows = plan("--recompute", "block", "--offload", "overlap", "--batch", "4")
    assert {(row["recompute"], row["offload"]) for row in rows if not row["refused"]} == {("block", True)}
    assert {row["strategy"] for row in rows if row["refused"]} == {"fsdp", "zero-bubble"}
    assert "+recompute block +offload" in printed
    tight = {"tile": 512, "ranks": 1, "out": tmp_path / "tight"}
    for words, code in (
        (("--recompute", "none", "--offload", "none", "--host-memory", "1KiB"), 1),
        (("--offload", "overlap", "--host-memory", "1KiB"), 1),
        ((), 0),
    ):
        plan("--memory", "840MiB", "--batch", "1", *words, **tight, code=code)


@pytest.fixture
def known_speeds(monkeypatch, tmp_path):
    """Of this machine, as if they had just been measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    curve = Curve((1.0, 1e6), (1e-9, 1e-3))
    model = CostModel({}, {}, {"add": curve}, {"add": curve}, 0.1, 1.0)
    for name, found in (
        ("load_or_calibrate", lambda *_, **__: model),
        ("load_or_measure_copies", lambda *_, **__: CopySpeed(1e10, 1e10)),
        ("load_or_measure_links", lambda ranks, **_: LinkSpeed(ranks * 1e9, 2e-4, 3e8, 4e-4, 1.5, 4.5, 1e-3)),
    ):
        monkeypatch.setattr(f"app.planning.machine.{name}", found)


@pytest.mark.usefixtures("known_speeds")
def test_links_and_sums_of_this_machine_are_those_measured_on_it(capsys, monkeypatch):
    cluster = this_machine(2, device="cpu").cluster
    assert cluster.inside.bandwidth == 2e9
    assert cluster.inside.latency_s == 2e-4
    assert cluster.sum_s(300_000_000, [0, 1]) == pytest.approx(1 + 2 * 4e-4)
    assert (cluster.beside_backward, cluster.gathering) == (1.5, 4.5)
    assert "measuring messages and sums between 2 ranks of this machine" in capsys.readouterr().err
    many = this_machine(1000, device="cpu").cluster
    assert many.inside.bandwidth == 2 * usable_cores() * 1e9  # no thousand ranks are started to know how they talk
    monkeypatch.setattr("app.planning.machine.load_or_measure_links", mock.Mock(side_effect=RuntimeError("no link")))
    with pytest.raises(RunError, match="no link; name a device with --device-spec"):
        this_machine(2, device="cpu")
    monkeypatch.delattr("app.planning.machine.load_or_measure_links")
    assert this_machine(1, device="cpu").cluster.sums is None, "one rank talks to nobody"


@pytest.mark.usefixtures("known_speeds")
@pytest.mark.parametrize(
    ("threads_set", "ranks_of_threads", "lanes"),
    [(None, "4 ranks of 2 threads", 4), (1, "4 ranks of 1 thread", 8), (4, "2 ranks of 4 threads", 2)],
)
def test_ranks_are_calibrated_with_the_threads_that_they_compute_with(
    threads_set, ranks_of_threads, lanes, capsys, monkeypatch
):
    for name in ("node_cores", "usable_cores"):
        monkeypatch.setattr(f"app.planning.machine.{name}", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads_set:
        monkeypatch.setenv("OMP_NUM_THREADS", str(threads_set))
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads_set)
    assert this_machine(4, device="cpu").cluster.lanes == lanes
    assert f"calibrating this machine for {ranks_of_threads}, " in capsys.readouterr().err


@pytest.mark.parametrize(("memory", "host"), [(2 * GIB, 16 * GIB), (24 * GIB, 8 * GIB), (40 * GIB, 0)])
def test_ranks_of_this_machine_share_half_of_its_free_memory(memory, host, monkeypatch):
    """As much as a run fills with what it moves to the host, and on a CPU no more than the limit leaves."""
    monkeypatch.setattr("app.planning.machine.memory_bytes", lambda: (128 * GIB, 64 * GIB))
    cluster = this_machine(2, memory=memory, device="cpu", timed=False).cluster
    assert cluster.host_bytes == host
    assert this_machine(2, memory=memory, host_memory=GIB, device="cpu", timed=False).cluster.host_bytes == GIB


def test_read_ahead_takes_memory_of_the_host(monkeypatch):
    """It had been taken off a GPU, and what was left of a CPU could be less than nothing."""
    monkeypatch.setattr("app.planning.machine.memory_bytes", lambda: (128 * GIB, 64 * GIB))
    assert this_machine(2, reserved=2 * GIB, device="cpu", timed=False).cluster.memory_bytes == 30 * GIB
    with pytest.raises(RunError, match="32 GiB of memory are free a rank, and --read-ahead takes 33 GiB: lower it"):
        this_machine(2, reserved=33 * GIB, device="cpu", timed=False)
    gpu = SimpleNamespace(name="GPU", free_bytes=40 * GIB, bf16=True)
    monkeypatch.setattr("app.planning.machine.device_kind", lambda _: "cuda")
    monkeypatch.setattr("app.planning.machine.gpu_at", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert this_machine(2, reserved=33 * GIB, timed=False).cluster.memory_bytes == 40 * GIB - CUDA_CONTEXT


@pytest.mark.parametrize(
    ("device", "precision"), [("v100-16gb", "fp32"), ("a100-80gb", "bf16"), ("a100-80gb:1,v100-16gb:1", "fp32")]
)
def test_the_precision_of_a_plan_is_that_of_training(device, precision):
    machine = named_machine(device, 1 + device.count(","))
    assert machine.precision == precision
    assert (machine.autocast is not None) == (precision == "bf16")
    with pytest.raises(ValueError, match="--precision bf16 is not on the data sheet of v100-16gb: use fp32 or fp16"):
        named_machine("v100-16gb", 1, precision="bf16")


@pytest.mark.parametrize(
    ("precision", "dtype", "tf32"),
    [("fp32", torch.float32, False), ("tf32", torch.float32, True), ("bf16", torch.bfloat16, False)],
)
def test_each_precision_has_a_calibration_of_its_own(precision, dtype, tf32, monkeypatch):
    asked = []
    monkeypatch.setattr("parallel.profile.calibrate.gpu_at", lambda index: SimpleNamespace(name="NVIDIA A100"))
    monkeypatch.setattr("app.planning.machine.load_or_calibrate", asked.append)
    _calibrated(torch.device("cuda", 0), 1, 1, precision, True)
    assert (asked[0].dtype, asked[0].tf32) == (dtype, tf32)


@pytest.mark.parametrize(
    ("ranks", "per_node", "host_gib"), [(1, None, 256), (4, None, 64), (1024, None, 32), (8, 2, 128)]
)
def test_nodes_of_a_data_sheet_share_256_gib(ranks, per_node, host_gib):
    assert named_machine("v100-16gb", ranks, per_node=per_node).cluster.host_bytes == host_gib * GIB
    assert named_machine("v100-16gb", ranks, host_memory=5 * GIB).cluster.host_bytes == 5 * GIB


def test_what_tiles_need_is_one_sentence():
    def found(tile, name, ranks=4, **policy):
        return LargestTile(name, PLAIN, tile, PlanRow(Strategy(name, ranks, 1, 8).under(**policy)), None)

    whole, boxes = found(1024, "single", 1), found(4096, "ddp", stream=512)
    again, split = found(2048, "ddp", recompute="block"), found(2112, "1f1b")
    assert what_tiles_need([whole, found(1024, "fsdp"), boxes, again, split]) == (
        "tiles train up to 1024 px by data parallelism (fsdp), up to 2112 px with recomputation, offload or splitting "
        "(1f1b), up to 4096 px in boxes (ddp +stream 512)"
    )
    moved = found(1024, "single", 1, offload="overlap")
    assert what_tiles_need([whole, moved, found(1088, "single", 1, stream=512)]) == (
        "tiles train up to 1024 px as they are (single), up to 1088 px in boxes (single +stream 512)"
    )
    assert what_tiles_need([LargestTile("gpipe", PLAIN, 0, None, None)]) == "no tile fits, whatever is done"


def test_the_plan_stands_before_what_is_hardly_faster(capsys):
    slower, faster = (PlanRow(Strategy(name, 2, 1, 2), speed) for name, speed in (("ddp", 10.0), ("fsdp", 10.05)))
    print_rows([slower, faster], slower)
    printed = capsys.readouterr().out
    assert printed.index("ddp") < printed.index("fsdp")
