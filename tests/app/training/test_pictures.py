"""``--pictures resize`` from end to end: class folders of small pictures, their scores, ranks, resume and refusals."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from app import index
from app.launch.signals import Interrupt
from pipelines.catalog.failures import FailedSlides
from tests.app.conftest import Train, summary_of
from tests.app.test_train import equal, model_of
from tests.helpers import tiny_models
from tests.helpers.in_process import call
from tests.helpers.real import SVS

CLASSIFIER = "tests.helpers.tiny_models:classifier"
RUN = ("--pictures", "resize", "--tile", "32", "--model", CLASSIFIER, "--batch", "4", "--lr", "0.01")
RUN += (
    "--parallel",
    "single",
    "--microbatches",
    "2",
    "--developer",
    "twin-steps=0",
    "--developer",
    "validate-every=1000",
    "--steps",
)

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes whose pictures have the same names, of mixed sizes; a broken one, and a slide that is none."""
    root = tmp_path_factory.mktemp("pictures")
    numbers = np.random.default_rng(0)
    for split, count in (("train", 6), ("val", 3)):
        for c, name in enumerate(("ants", "bees")):
            folder = root / split / name
            folder.mkdir(parents=True)
            for k in range(count):
                width, height = ((50, 37), (24, 24), (33, 80))[k % 3]
                pixels = numbers.integers(0, 120, (height, width, 3)).astype(np.uint8)
                pixels[..., 2 * c] += 100
                cv2.imwrite(str(folder / f"{k}.{'png' if k % 2 else 'JPEG'}"), pixels)
    (root / "train" / "ants" / "broken.jpg").write_bytes((root / "train" / "ants" / "0.JPEG").read_bytes()[:300])
    shutil.copy(SVS, root / "train" / "bees")
    return root


@pytest.fixture(scope="module")
def run(pictures: Path, tmp_path_factory: pytest.TempPathFactory, train: Train) -> Path:
    out = tmp_path_factory.mktemp("pictures") / "run"
    done = train("--slides", pictures, *RUN, "4", "--out", out)
    assert done.returncode == 0, done.stderr
    assert "slides by split: train 12, val 6, test 0" in done.stdout
    return out


def test_bad_pictures_are_named_and_the_others_scored_as_torchvision_cuts_them(run: Path, pictures: Path) -> None:
    failed = {slide: error for slide, _, error in FailedSlides(run / "failed_slides.csv").rows()}
    assert set(failed) == {"train/ants/broken", "train/bees/CMU-1-Small-Region"}
    assert "this is a slide (read by tiled): leave out --pictures" in failed["train/bees/CMU-1-Small-Region"]
    model = tiny_models.classifier(2)
    model.load_state_dict(model_of(run))
    cut = v2.Compose([v2.Resize(37), v2.CenterCrop(32), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    normal = v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    with (run / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6
    for row in rows:
        (path,) = (pictures / row["slide"]).parent.glob(f"{Path(row['slide']).name}.*")
        assert row["label"] == path.parent.name
        with torch.no_grad():
            scores = model.eval()(normal(cut(Image.open(path)))[None]).softmax(1)[0]
        assert [float(row["score_ants"]), float(row["score_bees"])] == pytest.approx(scores.tolist(), abs=1e-5)


def test_ranks_and_a_resumed_run_end_with_the_same_weights(
    run: Path, pictures: Path, tmp_path: Path, train_ranks: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ranks", "resumed"):
        (tmp_path / name).mkdir()
        shutil.copy(run / "tiles.parquet", tmp_path / name)
    done = train_ranks(
        "--slides", pictures, *RUN, "4", "--ranks", "2", "--parallel", "gpipe", "--out", tmp_path / "ranks"
    )
    assert done.returncode == 0, done.stderr
    for key, values in model_of(run).items():
        assert torch.allclose(values, model_of(tmp_path / "ranks")[key], atol=1e-4), key
    asked = iter([False, True])
    resumed = (*("--slides", pictures), *RUN, "4", "--out", tmp_path / "resumed")
    with monkeypatch.context() as patch:
        patch.setattr(Interrupt, "requested", property(lambda _: next(asked), lambda _, value: None), raising=False)
        assert train_ranks(*resumed).returncode == 0
    assert summary_of(tmp_path / "resumed")["steps"] == 2
    assert train_ranks(*resumed, "--resume").returncode == 0
    assert equal(model_of(tmp_path / "resumed"), model_of(run))


def test_other_uses_are_refused_by_name(run: Path, pictures: Path, tmp_path: Path, train: Train) -> None:
    for words, message in (
        (("--mpp", "1"), "--mpp says nothing of --pictures resize"),
        (("--tile", "slide"), "--pictures resize needs a --tile"),
        (("--augment", "cpu"), "--augment cpu is for tiles"),
        (("--task", "segment"), "--pictures resize gives each picture one class"),
    ):
        refused = train("--slides", pictures, *RUN, "4", *words, "--out", tmp_path / "refused")
        assert refused.returncode == 2
        assert message in refused.stderr
    best = run / "checkpoints" / "best.pt"
    refused = call("app.predict", "--slides", pictures, "--checkpoint", best, "--model", CLASSIFIER, "--out", tmp_path)
    assert refused.returncode == 2
    assert "was trained with --pictures resize" in refused.stderr
    assert "predictions.csv" in refused.stderr
    words = ["--slides", str(pictures), "--out", str(tmp_path / "index"), "--pictures", "resize", "--tile", "32"]
    assert index.main(words) == 0


def test_names_in_a_table_may_be_paths(pictures: Path, tmp_path: Path, train: Train) -> None:
    table = tmp_path / "labels.csv"
    rows = [path.relative_to(pictures) for path in sorted(pictures.rglob("*/[0-9].*"))]
    table.write_text("slide,label\n" + "".join(f"{row},{'odd' if int(row.stem) % 2 else 'even'}\n" for row in rows))
    done = train("--slides", pictures, "--labels", table, *RUN, "1", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert f"18 slides, classify, labels from {table}: even, odd" in done.stdout
