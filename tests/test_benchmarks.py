"""Benchmarks of slides, models and plans: commands run to their end, shortened; what is kept and written of them."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.out_of_core import peaks
from benchmarks.out_of_core import run as out_of_core
from tests.helpers.benchmark_run import assert_runs

ROOT = Path(__file__).parents[1]


@pytest.mark.bench
@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("benchmarks.tile_reading.data_wait --tile 256 --steps 1 --side 1536", "data_wait_fraction"),
        ("benchmarks.many_slides.run --slides 1 --size 1200 --steps 1", "trained on 1 tiles"),
        ("benchmarks.tile_reading.run --side 9000 --rounds 0.02", "peak memory of one 8192 px read"),
        (
            "benchmarks.plan_accuracy.layer_times --px 64 --nets plain12 --seconds 0.2 --rounds 1",
            "Convolutions of plain12",
        ),
        ("benchmarks.weak_scaling.run --quick", "Simulated efficiency at 64 ranks"),
        ("benchmarks.weak_scaling.trained --quick", "resnet20_v2 on tiles of 64 px, V100, simulated"),
        ("benchmarks.nuclei.compare microbatch --steps 1 --folds 1", "1 steps. 112 MiB a rank."),
        ("benchmarks.plan_accuracy.plan_speed --only one-node", "s on the cores"),
        ("benchmarks.formats.run --regions 4", "4 regions of each slide"),
        ("benchmarks.annotations.run --vertices 2000 --tiles 2", "2,000 vertices in each"),
        ("benchmarks.tile_size.run bands-resnet18 --slides 8 --steps 1 --seeds 1 --windows '512 px' bag", "| bag"),
        ("benchmarks.tile_size.run rooms --slides 8 --steps 1 --seeds 1 --windows 'whole slide'", "| whole slide"),
    ],
)
def test_benchmark_runs(command: str, says: str) -> None:
    assert_runs(command, says)


@pytest.mark.bench
@pytest.mark.parametrize(
    ("command", "says"),
    [("benchmarks.bags.run noise --slides 8 --steps 1 --seeds 1", "| --tile slide --head attention")],
)
def test_benchmark_that_forks_its_runs(command: str, says: str) -> None:
    """Use a process of its own: autograd refuses to work in a fork of one that has made a backward pass."""
    module, *arguments = command.split()
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert says in done.stdout


def test_tables_name_the_command_that_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["/bin/python3", "-m", "benchmarks.teams.run", "--models", "unet:64"])
    assert "Written by `python -m benchmarks.teams.run --models unet:64`: " in results.results("a table")


@pytest.mark.parametrize(
    "command",
    [
        "benchmarks.plan_accuracy.run --only vgg-2",
        "benchmarks.plan_accuracy.plan_speed --only one-node",
        "benchmarks.streaming.coverage --only resnet18",
        "benchmarks.streaming.speed --only resnet18",
    ],
)
def test_a_part_of_a_table_does_not_replace_it(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, *arguments = command.split()
    monkeypatch.setattr(sys, "argv", [module, *arguments, "--write"])
    main = importlib.import_module(module).main
    del sys.modules[module]  # other tests run it as a command, which warns of a module that is there already
    with pytest.raises(SystemExit):
        main()
    assert "leave out --only" in capsys.readouterr().err


def test_rows_out_of_core_are_kept_without_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"model": "unet", "px": 64, "way": "none", "predicted": 1, "predicted_host": 0, "measured": None}
    monkeypatch.setattr(results, "OUT", tmp_path)
    monkeypatch.setattr(peaks, "rows", lambda *_: [row])
    monkeypatch.setattr(sys, "argv", ["benchmarks.out_of_core.run", "--parts", "peaks"])
    out_of_core.main()
    assert results.read_json("out_of_core_2GiB")["peaks"] == {"unet|64|none": row}
