"""Nuclei segmented in five folds: ``app.train`` and ``app.predict`` compared with a plain training loop over smp.

Takes images and masks of the same names; gives Dice of the nuclei for each image, when it was held out, of a U-Net
trained by MegaTile and of ``segmentation_models_pytorch.Unet`` trained by a plain loop (crops, flips, quarter turns,
brightness, cross entropy + Dice, Adam, cosine) for as many seconds of the processor as the whole of ``app.train`` took,
start and index included. Both begin from random weights: nothing is downloaded. Seconds of the processor do not depend
on what else the machine does.

    python -m benchmarks.nuclei.run [--images data/nuclei/images --masks data/nuclei/masks] [--steps 400] [--write]
"""

from __future__ import annotations

import csv
import json
import shutil
import time
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from segmentation_models_pytorch import Unet
from segmentation_models_pytorch.losses import DiceLoss

from app.evaluation.areas import AreaScores
from app.prediction.prediction_folder import PredictionFolder
from benchmarks.results import OUT as BENCH_DATA
from benchmarks.results import ROOT, markdown_table, parser_of, publish, results
from benchmarks.timing import run_app

OUT, NUCLEI = BENCH_DATA / "nuclei", ROOT / "data" / "nuclei"
FOLDS, TILE, BATCH, RESAMPLES = 5, 256, 8, 1000
MODEL = "unet_w16"
TRAIN = ["--model", MODEL, "--tile", str(TILE), "--stride", "64", "--batch", str(BATCH), "--lr", "0.003"]
TRAIN += ["--warmup", "20", "--mpp", "0.5", "--slide-mpp", "0.5", "--min-tissue", "0", "--parallel", "single"]
TRAIN += ["--validate-every=1000000", "--twin-steps=0"]
PEER_ENCODER, PEER_LR = "resnet18", 1e-3

Images = dict[str, tuple[NDArray[np.uint8], NDArray[np.uint8]]]


def folds_of(names: list[str]) -> list[list[str]]:
    """Names by fold, drawn once for ever."""
    order = np.random.default_rng(0).permutation(sorted(names))
    return [sorted(map(str, order[fold::FOLDS])) for fold in range(FOLDS)]


def by_megatile(
    out: Path, held: list[str], images: Path, masks: Path, names: list[str], *settings: str
) -> dict[str, Any]:
    """Train on all but ``held``, predict those: Dice by name, seconds of the processor in training.

    Args:
        settings: of ``app.train``, after those of ``TRAIN``.
    """
    shutil.rmtree(out, ignore_errors=True)
    for part, own in (("train", sorted(set(names) - set(held))), ("val", held)):
        (out / "slides" / part).mkdir(parents=True)
        for name in own:
            shutil.copy(images / f"{name}.png", out / "slides" / part)
    given = ["--slides", str(out / "slides"), "--annotations", str(masks)]
    run = [*given, *TRAIN, *settings, "--out", str(out / "run")]
    seconds = run_app("app.train", *run).cpu
    checkpoint = str(out / "run" / "checkpoints" / "last.pt")
    predicted = out / "predicted"
    where = ["--slides", str(out / "slides" / "val"), "--checkpoint", checkpoint, "--out", str(predicted)]
    run_app("app.predict", *where, "--slide-mpp", "0.5", "--overlap", "0.5")
    folder = PredictionFolder(predicted)
    scores = AreaScores(folder, [row["slide"] for row in folder.rows()], ["foreground"], masks)
    assert len(scores.slides) == len(held), scores.left_out
    dice = {Path(slide).stem: float(value) for slide, value in zip(scores.slides, scores.dice[:, 0], strict=True)}
    return {"dice": dice, "cpu_s": seconds}


def by_smp(fold: int, held: list[str], read: Images, cpu_s: float) -> dict[str, Any]:
    """The same of a plain loop that ends after ``cpu_s`` seconds of the processor."""
    torch.manual_seed(fold)
    rng = np.random.default_rng(fold)
    model = Unet(PEER_ENCODER, encoder_weights=None, classes=2).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), PEER_LR)
    dice_loss = DiceLoss("multiclass")
    train = [pair for name, pair in read.items() if name not in held]
    begun_s, steps = time.process_time(), 0
    while (done := (time.process_time() - begun_s) / cpu_s) < 1:
        for group in optimizer.param_groups:
            group["lr"] = PEER_LR * 0.5 * (1 + np.cos(np.pi * done))
        drawn = (train[i] for i in rng.integers(len(train), size=BATCH))
        chosen = [_crop(image, mask, rng) for image, mask in drawn]
        pixels = torch.from_numpy(np.stack([image for image, _ in chosen]))
        targets = torch.from_numpy(np.stack([mask for _, mask in chosen])).long()
        logits = model(_floats(pixels))
        loss = torch.nn.functional.cross_entropy(logits, targets) + dice_loss(logits, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
    model.eval()
    dice = {}
    with torch.inference_mode():
        for name in held:
            image, mask = read[name]
            predicted = model(_floats(torch.from_numpy(image[None]))).argmax(1)[0].numpy()
            dice[name] = 2 * float((predicted & mask).sum()) / float(predicted.sum() + mask.sum())
    return {"dice": dice, "cpu_s": time.process_time() - begun_s, "steps": steps}


def _crop(
    image: NDArray[np.uint8], mask: NDArray[np.uint8], rng: np.random.Generator
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """A random square of an image, turned, mirrored, lighter or darker, and its mask."""
    y, x = (int(rng.integers(side - TILE + 1)) for side in mask.shape)
    turns, mirrored = int(rng.integers(4)), bool(rng.integers(2))
    cut = [np.rot90(whole[y : y + TILE, x : x + TILE], turns) for whole in (image, mask)]
    cut = [np.ascontiguousarray(part[:, ::-1] if mirrored else part) for part in cut]
    light = np.clip(cut[0].astype(np.float32) * rng.uniform(0.8, 1.2), 0, 255).astype(np.uint8)
    return light, cut[1]


def _floats(pixels: torch.Tensor) -> torch.Tensor:
    """uint8 (n, h, w, 3) as smp's networks take it: float32 (n, 3, h, w), of ImageNet's mean and deviation."""
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return ((pixels / 255 - mean) / deviation).permute(0, 3, 1, 2)


def interval(values: list[float]) -> tuple[float, float]:
    """95 % of the means of ``RESAMPLES`` resamples of images."""
    rng = np.random.default_rng(0)
    means = np.array(values)[rng.integers(len(values), size=(RESAMPLES, len(values)))].mean(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--images", type=Path, default=NUCLEI / "images")
    parser.add_argument("--masks", type=Path, default=NUCLEI / "masks")
    parser.add_argument("--steps", type=int, default=400, help="of app.train; the peer gets its seconds")
    given = parser.parse_args()
    names = [path.stem for path in given.images.glob("*.png")]
    read: Images = {}
    for name in names:
        image = cv2.cvtColor(cv2.imread(str(given.images / f"{name}.png")), cv2.COLOR_BGR2RGB).astype(np.uint8)
        mask = cv2.imread(str(given.masks / f"{name}.png"), cv2.IMREAD_GRAYSCALE)
        assert mask is not None
        read[name] = image, (mask > 0).astype(np.uint8)
    OUT.mkdir(parents=True, exist_ok=True)
    ours: dict[str, float] = {}
    theirs: dict[str, float] = {}
    rows: list[tuple[str, ...]] = []
    for fold, held in enumerate(folds_of(names)):
        settings = ("--steps", str(given.steps), "--seed", str(fold))
        own = by_megatile(OUT / f"fold{fold}", held, given.images, given.masks, names, *settings)
        peer = by_smp(fold, held, read, own["cpu_s"])
        ours |= own["dice"]
        theirs |= peer["dice"]
        fold_means = [float(np.mean(list(result["dice"].values()))) for result in (own, peer)]
        rows.append((str(fold), str(len(held)), *(f"{mean:.3f}" for mean in fold_means)))
        rows[-1] += (f"{own['cpu_s']:.0f}", f"{peer['cpu_s']:.0f}", f"{given.steps}", f"{peer['steps']}")
        print(json.dumps(rows[-1]), flush=True)
    with (OUT / "dice.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("image", "megatile", "smp"), *((n, ours[n], theirs[n]) for n in sorted(ours))])
    header = ("fold", "images", "Dice, MegaTile", "Dice, smp", "CPU s", "CPU s, smp", "steps", "steps, smp")
    differences = [ours[name] - theirs[name] for name in ours]
    said = [
        f"{who}: mean Dice of {len(values)} images {np.mean(values):.3f}, 95 % interval "
        f"{interval(values)[0]:.3f} to {interval(values)[1]:.3f}."
        for who, values in (("MegaTile", list(ours.values())), ("smp", list(theirs.values())))
    ]
    low, high = interval(differences)
    said.append(f"Difference image by image: {np.mean(differences):+.3f}, 95 % interval {low:+.3f} to {high:+.3f}.\n")
    publish(__file__, results(markdown_table(header, rows), "\n".join(said)), given.write)


if __name__ == "__main__":
    main()
