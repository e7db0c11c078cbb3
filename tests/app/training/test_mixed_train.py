"""``--device mixed`` as a user asks for it: two processes, one of which stands in for a rank on a GPU."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from app.train import main
from tests.app.conftest import QUICK, summary_of
from tests.helpers.forked import run_ranks
from tests.helpers.in_process import put_back

PLAIN = ["--parallel", "single", "--device", "cpu"]
NET = ["--model", "resnet11_v2"]  # which draws nothing
ASKED = [*QUICK, *NET, "--tile", "128", "--optimizer", "sgd", "--steps", "3", "--microbatches", "4"]
MIXED = ["--parallel", "ddp", "--device", "mixed", "--cpu-ranks", "1"]


def as_if_on_gpus(*arguments: str) -> int:
    """``app.train`` on a rank that, unless it is one of the last, says it is on a GPU of its own and computes on the
    CPU. Nothing else is another than on a machine with GPUs."""
    from app.launch import place
    from parallel.comm import torch_comm
    from parallel.comm.kinds import RankKind

    def own_kind(_: torch.device) -> RankKind:
        return RankKind("here", "cpu") if place._on_cpu(place.find_launch(), 1) else RankKind("here", "cuda", "GPU-0")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_comm, "own_kind", own_kind)
        patch.setattr(place, "choose_device", lambda *_: torch.device("cpu"))
        return main(list(arguments))


@pytest.fixture(scope="module")
def plain_run(classify_slides: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    out = tmp_path_factory.mktemp("plain") / "run"
    with put_back():
        assert main(["--slides", str(classify_slides), *ASKED, *PLAIN, "--out", str(out)]) == 0
    return out


@pytest.mark.process
@pytest.mark.parametrize("extra", [("--shares", "3,1"), ("--shares", "2,2", "--mixed-sums=host")])
def test_a_mixed_run_is_that_of_one_process(
    extra: tuple[str, ...], plain_run: Path, classify_slides: Path, tmp_path: Path
) -> None:
    mixed = tmp_path / "mixed"
    words = ["--slides", str(classify_slides), *ASKED, *MIXED, *extra, "--out", str(mixed)]
    codes, printed = run_ranks(2, "tests.app.training.test_mixed_train:as_if_on_gpus", words, tmp_path)
    assert codes == [0, 0], printed
    losses = []
    for run in (plain_run, mixed):
        with (run / "metrics.csv").open() as file:
            losses.append([float(row["loss"]) for row in csv.DictReader(file)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    weights = [torch.load(run / "checkpoints" / "last.pt", weights_only=True)["model"] for run in (plain_run, mixed)]
    for name, value in weights[0].items():
        assert (weights[1][name] - value).abs().max() <= 1e-4 * max(1, value.abs().max()), name
    assert summary_of(mixed)["ranks"] == 2


@pytest.mark.process
def test_without_a_gpu_it_is_refused_before_anything_is_trained(classify_slides: Path, tmp_path: Path) -> None:
    words = ["--slides", str(classify_slides), *QUICK, *MIXED, "--steps", "1", "--out", str(tmp_path / "run")]
    codes, printed = run_ranks(2, "app.train", words, tmp_path, 100)
    assert 2 in codes, printed
    assert "--device mixed: no usable GPU was found; run `python -m app.doctor`, or use --device cpu" in printed
    assert not (tmp_path / "run" / "metrics.csv").exists()
