"""The calibrated cost model: fitted to made-up laws, kept as JSON, run on a real device with a tiny budget."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallel.cost.calibrated import CostModel, Polynomial, fit, work_of, work_of_shape
from parallel.cost.roofline import ROUND, Product, products
from parallel.graph.layers import Convolution, LayerGraph
from parallel.profile import cache
from parallel.profile import calibrate as calibration
from parallel.profile.cache import CoreUse, keep, kept_at, kept_text, others_now
from parallel.profile.calibrate import DeviceUse, calibrate, fit_model, load_or_calibrate
from parallel.profile.gpu import Gpu
from parallel.profile.op_timing import MOVING
from parallel.trace.trace import trace

CPU = torch.device("cpu")
KEY = DeviceUse(CPU).key()


def law(flops: float, channels_in: int, kernel: int) -> float:
    """Seconds of a made-up device: slower where there are few channels, faster for large kernels."""
    return flops / 2e11 * (1 + 16 / channels_in) * kernel**-0.2


def made_up_readings(shapes: int = 400) -> Iterator[dict[str, Any]]:
    """What a worker would read on a device that follows ``law`` and moves 10 GB/s."""
    for name in MOVING:
        for size in (1e5, 1e6, 1e8):
            yield {"what": "moving", "name": name, "forward": [size, size / 1e10], "backward": [size, size / 1e10]}
    for _, shape in itertools.islice(products(seed=3), shapes):
        work = work_of_shape(shape)
        seconds = work.flops / 1e11
        if isinstance(shape, Convolution):
            seconds = law(work.flops, shape.channels_in, math.prod(shape.kernel))
        reading = {"forward_s": seconds, "input_s": 2 * seconds, "weight_s": 3 * seconds}
        what = "product" if isinstance(shape, Product) else "convolution"
        yield {"what": what, "shape": asdict(shape), "reading": reading}


@pytest.fixture(scope="module")
def made_up() -> CostModel:
    return fit_model(made_up_readings(), KEY, 1.0)


class Odd(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return F.softplus(images)


def graph_of(px: int) -> LayerGraph:
    convs = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 5, padding=2), nn.Conv2d(64, 48, 3, padding=1)
    return trace(nn.Sequential(convs[0], nn.BatchNorm2d(32), nn.ReLU(), *convs[1:], Odd()), (1, 3, px, px)).graph


def test_a_law_is_recovered_on_shapes_that_were_not_seen(made_up: CostModel) -> None:
    assert made_up.expected_error < 0.08
    graph = graph_of(200)
    costs = dict(zip((layer.name for layer in graph.layers), made_up.estimate(graph).layers, strict=True))
    for name, channels_in, kernel in (("3", 32, 25), ("4", 64, 9)):
        layer = next(layer for layer in graph.layers if layer.module == name)
        expected = law(layer.flops, channels_in, kernel)
        assert costs[layer.name].forward_s == pytest.approx(expected, rel=0.1)
        assert costs[layer.name].backward_input_s == pytest.approx(2 * expected, rel=0.1)
        assert costs[layer.name].backward_s == pytest.approx(5 * expected, rel=0.1)


def test_costs_of_other_layers_and_tiles(made_up: CostModel, tmp_path: Path) -> None:
    graph = graph_of(64)
    costs = made_up.estimate(graph)
    first = costs.layers[1]  # only weights have gradients where nothing flows on
    assert first.backward_input_s == 0
    assert first.backward_s == pytest.approx(3 * first.forward_s, rel=0.1)
    odd = next(k for k, layer in enumerate(graph.layers) if layer.module == "5" or layer.kind == "softplus")
    assert graph.layers[odd].ops[0].name not in made_up.forward  # it takes the curve of a usual one
    assert costs.layers[odd].forward_s == pytest.approx(2 * graph.layers[odd].output_bytes / 1e10, rel=0.01)
    large, larger = (sum(made_up.estimate(graph_of(px)).seconds) for px in (8192, 16384))
    assert larger / large == pytest.approx(4, rel=0.01)
    keep(tmp_path / "model.json", made_up.to_json())
    kept = CostModel.from_json(kept_text(tmp_path / "model.json"))
    assert kept == made_up
    assert kept.estimate(graph) == costs


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(32, 48, 5, 2, 2, bias=False),
        nn.Conv2d(32, 64, 3, padding=1, groups=8, bias=False),
        nn.Conv2d(32, 32, 3, padding=1, groups=32, bias=False),
        nn.ConvTranspose2d(32, 16, 2, 2, bias=False),
        nn.Linear(256, 100, bias=False),
    ],
)
def test_graphs_and_the_design_speak_of_the_same_work(layer: nn.Module) -> None:
    linear = isinstance(layer, nn.Linear)
    (op,) = trace(nn.Sequential(layer), (64, 256) if linear else (2, 32, 24, 24)).graph.layers[1].ops
    assert work_of(op) == work_of_shape(Product(64, 256, 100) if linear else op.convolution)


def test_one_row_is_not_taken_for_a_square_of_as_many_numbers() -> None:
    """A linear layer of one tile reads each weight once, and attains less arithmetic than one of many rows."""
    row, square = work_of_shape(Product(1, 512, 4096)), work_of_shape(Product(64, 512, 64))
    assert (row.flops, row.features[1:]) == (square.flops, square.features[1:])
    assert row.features[0] < square.features[0]


def test_every_beginning_of_the_design_has_all_kinds() -> None:
    once = sum(ROUND.values())
    drawn = list(itertools.islice(products(seed=0), 3 * once))
    assert drawn == list(itertools.islice(products(seed=0), 3 * once))
    for start in range(0, 3 * once, once):
        kinds = [kind for kind, _ in drawn[start : start + once]]
        assert {kind: kinds.count(kind) for kind in ROUND} == ROUND
    assert all(work_of_shape(shape).kind == kind for kind, shape in drawn)


def test_a_polynomial_is_recovered_and_bounded() -> None:
    random = np.random.default_rng(0)
    features = random.uniform(0, 4, (200, 3))
    ratios = np.exp(0.5 + 0.2 * features[:, 0] - 0.05 * features[:, 1] ** 2 + 0.1 * features[:, 0] * features[:, 2])
    polynomial, left_out = fit(features.tolist(), ratios.tolist())
    assert float(np.median(left_out)) < 0.01
    assert polynomial(features[:5].tolist()) == pytest.approx(ratios[:5], rel=0.02)
    edge, beyond = polynomial([[features[:, 0].max(), 1.0, 1.0], [100.0, 1.0, 1.0]])
    assert beyond == pytest.approx(edge)
    assert Polynomial.from_dict(dataclasses.asdict(polynomial)) == polynomial
    constant, _ = fit([[1.0, 2.0]] * 4, [1.0, 2.0, 2.0, 5.0])  # of few readings
    assert constant([[7.0, 7.0]]) == pytest.approx(2.0)


def test_each_way_of_running_has_a_calibration_of_its_own(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keys = [
        KEY,
        DeviceUse(CPU, threads=2).key(),
        DeviceUse(CPU, together=2).key(),
        DeviceUse(CPU, dtype=torch.bfloat16).key(),
        DeviceUse(CPU, channels_last=False).key(),
        KEY | {"torch": "2.0"},
        KEY | {"device": "abacus"},
    ]
    assert len({kept_at(key) for key in keys}) == len(keys)
    assert KEY["device"]
    assert all(kept_at(key).parent == tmp_path / "megatile" for key in keys)


def test_a_gpu_has_a_calibration_for_fp32_and_one_for_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibrations of earlier versions say nothing of it, as convolutions were in TF32: they are not used."""
    gpu = Gpu("NVIDIA A100", 1 << 30, 1 << 30, "8.0", bf16=True, missing_kernels="")
    monkeypatch.setattr(calibration, "gpu_at", lambda index: gpu)
    uses = [DeviceUse(torch.device("cuda", 0), tf32=tf32) for tf32 in (False, True)]
    assert [use.key()["tf32"] for use in uses] == [False, True]
    assert "tf32" not in KEY
    started: list[dict[str, Any]] = []

    def run(settings: list[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
        started.extend(settings)
        raise RuntimeError("enough")

    monkeypatch.setattr(calibration, "_run", run)
    for use in uses:
        with pytest.raises(RuntimeError, match="enough"):
            calibrate(use)
    assert [settings["tf32"] for settings in started] == [False, True]


def test_the_process_of_a_calibration_computes_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    switched: list[bool] = []
    settings = {"device": "cpu", "threads": torch.get_num_threads(), "dtype": "float32", "channels_last": True}
    settings |= {"tf32": True, "seconds": 0.0, "seed": 0}
    monkeypatch.setattr(sys, "argv", ["", json.dumps(settings)])
    monkeypatch.setattr(sys, "stdin", io.StringIO("go\n"))
    monkeypatch.setattr(calibration, "set_tf32", lambda allowed: switched.append(allowed) or pytest.exit("enough"))
    with pytest.raises(pytest.exit.Exception):
        calibration.main()
    assert switched == [True]


def test_a_longer_calibration_replaces_a_shorter_one(monkeypatch, tmp_path: Path, made_up: CostModel) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = mock.Mock(side_effect=lambda _, seconds: dataclasses.replace(made_up, seconds_taken=seconds))
    monkeypatch.setattr(calibration, "calibrate", made)
    for seconds in (20, 10, 90, 20):
        assert load_or_calibrate(DeviceUse(CPU), seconds).seconds_taken >= seconds
    assert made.call_count == 2
    assert len(list((tmp_path / "megatile").iterdir())) == 1


def test_a_calibration_made_on_a_busy_machine_is_made_again_on_a_calm_one(
    monkeypatch, tmp_path: Path, made_up: CostModel, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = [dataclasses.replace(made_up, seconds_taken=45.0, others=share) for share in (0.02, 0.5)]
    monkeypatch.setattr(calibration, "calibrate", lambda *_, **__: made.pop())

    def said(now: float | None = None) -> str:
        """What a plan is told when others take that share at present; None when nobody is to look."""
        caplog.clear()
        monkeypatch.setattr(cache, "others_now", lambda: now if now is not None else pytest.fail("looked"))
        load_or_calibrate(DeviceUse(CPU))
        return " ".join(record.getMessage() for record in caplog.records)

    assert said().startswith("other programs took 50 % of the cores while operations were measured: real times may")
    assert "took 50 % of the cores while operations were measured, and take 30 % now" in said(0.3)
    assert len(made) == 1
    assert said(0.05) == "measuring operations again: other programs took 50 % of the cores then, and are gone"
    assert said() == ""


def test_what_others_take_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = sorted(os.sched_getaffinity(0))
    readings = iter([(0.0, 0.0, 0.0), (10.0, 10.0 * len(cores), 2.5 * len(cores)), (20.0, 3.0, 3.0)])
    monkeypatch.setattr(CoreUse, "_read", lambda _: next(readings))
    use = CoreUse()
    assert use.others() == pytest.approx(0.75)  # all cores at work, a quarter of it for this process
    assert use.others() == 0.0


@pytest.mark.process
def test_a_program_beside_this_one_is_seen() -> None:
    beside = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.2)
        assert others_now() > 0.25 / len(os.sched_getaffinity(0))
    finally:
        beside.kill()
        beside.wait()


CHATTY = """#!{python}
import json, pathlib, sys, time
own, done = json.loads(sys.argv[-1])["seed"], pathlib.Path("{done}")
print("ready", flush=True)
sys.stdin.readline()
if own:
    print("x" * (1 << 20), flush=True)
    done.touch()
until = time.monotonic() + 20
while not done.exists() and time.monotonic() < until:
    time.sleep(0.01)
for _ in range({timed}):
    print(json.dumps({{"what": "convolution", "free": done.exists()}}))
"""


def chatty(folder: Path, timed: int) -> str:
    """Return a program in place of Python that prints ``timed`` readings, as the process of seed 1 or after it."""
    python = folder / "python"
    python.write_text(CHATTY.format(python=sys.executable, done=folder / "done", timed=timed))
    python.chmod(0o755)
    return str(python)


@pytest.mark.process
def test_no_process_of_a_calibration_waits_for_its_pipe_to_be_read(monkeypatch, tmp_path: Path) -> None:
    """The first process ends once the second has written more than a pipe holds."""
    once = sum(ROUND.values())
    monkeypatch.setattr("sys.executable", chatty(tmp_path, once))
    readings = calibration._run([{"device": "cpu", "seed": seed} for seed in (0, 1)], 1.0)
    assert [reading["free"] for reading in readings] == [True] * 2 * once


@pytest.mark.process
def test_a_process_that_ends_before_every_kind_is_timed_is_quoted(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.executable", chatty(tmp_path, sum(ROUND.values()) - 1))
    with pytest.raises(RuntimeError, match="said: nothing; exit code 0"):
        calibration._run([{"device": "cpu", "seed": 1}], 1.0)


@pytest.mark.process
def test_a_calibration_of_this_machine_gives_costs_or_its_process_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = calibrate(DeviceUse(CPU, together=2), 0.5)
    assert set(model.products) == set(ROUND)
    assert set(model.forward) == set(MOVING)
    assert 0 <= model.others <= 1
    graph = graph_of(64)
    costs = model.estimate(graph)
    assert [layer.name for layer, cost in zip(graph.layers, costs.layers, strict=True) if not cost.seconds] == [
        graph.layers[0].name,
        graph.layers[-1].name,
    ]
    assert all(math.isfinite(seconds) and seconds >= 0 for seconds in costs.seconds)
    assert costs.expected_error == model.expected_error
    assert "in 0 s" in costs.source or "in 1 s" in costs.source
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(RuntimeError, match=r"operations on cpu, .* said: nothing; exit code 1"):
        calibrate(DeviceUse(CPU), 0.5)
