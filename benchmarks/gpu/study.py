"""The published study of CPU offload: each network in each mode, training time over that without offload.

Takes nothing; gives a row per network and mode. Modes start from the same weights, see the same batches and take turns
epoch by epoch. Copies are timed in steps of their own after the others, because reading a clock at every copy takes
time too.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu import naive
from benchmarks.gpu.setting import Row, Setting, attempt, shown
from benchmarks.gpu.work import copied
from benchmarks.whole_engine import whole_engine
from models.registry import build_model
from parallel.comm.thread_comm import LocalCommunicator
from parallel.engine.step import Microbatch
from parallel.memory.policy import ActivationPolicy
from parallel.offload.copies import CopyClock

PUBLISHED_MODES = ("none", *naive.MODES)
PUBLISHED = {
    "vgg19": (30.1, 150.5, 166.7, 154.0, 161.0),
    "alexnet": (24.1, 42.2, 47.4, 41.5, 47.6),
    "resnet50": (26.2, 113.6, 110.1, 113.6, 109.4),
    "inception_v3": (32.2, 124.3, 120.2, 123.1, 119.3),
}
"""Model -> seconds in each of ``PUBLISHED_MODES`` for 20 epochs on a V100, batch 32, 398 pictures of ants and bees."""
MODES = (*PUBLISHED_MODES, "overlap")
LARGER = {"inception_v3": 299 / 224}
"""Side of a picture over that of the others': what the network is made for."""
LEARNING_RATE, MOMENTUM = 0.001, 0.9
VALIDATION = 0.4
"""Part of the pictures that validates: about that of the study's own set, 153 of 397."""
LEAST = 2
"""Pictures of the last batch of an epoch below which it is left out: BatchNorm takes no fewer."""
TIMED_STEPS = 2
"""Of each mode, in which every copy is timed."""
HEADER = ("model", "mode", "epochs", "training, s", "over none", "published", "accuracy", "out: mean, GB/s", "back")


@dataclass(frozen=True, eq=False)
class Pictures:
    """Two classes of noise, one brighter: the work is the same as with other pictures.

    Attributes:
        train, val: uint8 (n, 3, px, px) and labels int64 (n,).
    """

    train: tuple[Tensor, Tensor]
    val: tuple[Tensor, Tensor]

    @classmethod
    def made(cls, px: int, count: int) -> Pictures:
        """Return ``count`` pictures, a part of which validates."""
        labels = torch.arange(count) % 2
        noise = torch.randint(0, 192, (count, 3, px, px), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
        images = noise + (labels * 63).to(torch.uint8)[:, None, None, None]
        train = count - round(VALIDATION * count)
        return cls((images[:train], labels[:train]), (images[train:], labels[train:]))


@dataclass
class Trained:
    """One model in one mode: seconds of each epoch, loss of each step, best accuracy of an epoch, copies of a step."""

    mode: str
    epochs_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    best_accuracy: float = 0.0
    copies: Row = field(default_factory=dict)


class Student:
    """A model in one mode, at work.

    Args:
        module: of its own, on the device.
        pictures: on the CPU.
        batch: pictures of a step.
    """

    def __init__(self, module: nn.Module, mode: str, pictures: Pictures, batch: int, setting: Setting) -> None:
        self.trained = Trained(mode)
        self._pictures, self._batch, self._setting = pictures, batch, setting
        self._optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
        self._engine = whole_engine(
            module,
            F.cross_entropy,
            lambda _: self._optimizer,
            LocalCommunicator(),
            batch=batch,
            m=1,
            shape=(batch, *pictures.train[0].shape[1:]),
            device=setting.device,
            policy=ActivationPolicy(offload="overlap" if mode == "overlap" else "none"),
        )
        self._naive = None
        if mode in naive.MODES:
            state = (*module.parameters(), *module.buffers())
            self._naive = naive.NaiveOffload(mode, setting.device, state)
        saved_tensors = self._engine._work.stages[0]._saved_tensors
        self._clock = self._naive.clock if self._naive else saved_tensors.copies.clock if saved_tensors else CopyClock()

    def train(self, epoch: int) -> None:
        """Go once through the training pictures, timed."""
        self._setting.settle()
        began_s = time.perf_counter()
        for picks in self._batches(epoch):
            self.step(picks)
        self._setting.settle()
        self.trained.epochs_s.append(time.perf_counter() - began_s)
        self._optimizer.zero_grad(set_to_none=True)  # room for the other modes

    def validate(self) -> None:
        right = 0
        images, labels = self._pictures.val
        for part, of_part in zip(images.split(self._batch), labels.split(self._batch), strict=True):
            logits = self._engine.predict(Microbatch(self._floats(part), None, tuple(part.shape)))
            right += int((logits.argmax(1).cpu() == of_part).sum())
        self.trained.best_accuracy = max(right / len(labels), self.trained.best_accuracy)

    def time_copies(self) -> None:
        """Take a few more steps, and the time of every copy."""
        self._clock.times.clear()
        self._clock.on = True
        for picks in itertools.islice(self._batches(0), TIMED_STEPS):
            self.step(picks)
        self._setting.settle()
        self.trained.copies = copied(self._clock)
        self._clock.on = False
        self._engine.close()

    def step(self, picks: Tensor | None = None) -> None:
        """Train on the pictures ``picks``, by default those of the first batch."""
        images, labels = (of_all[next(self._batches(0)) if picks is None else picks] for of_all in self._pictures.train)
        part = Microbatch(self._floats(images), labels.to(self._setting.device), tuple(images.shape))
        with self._naive.moving() if self._naive else contextlib.nullcontext():
            result = self._engine.step([part], len(self.trained.losses), LEARNING_RATE)
        self.trained.losses.append(result.loss)

    def _batches(self, epoch: int) -> Iterator[Tensor]:
        count = len(self._pictures.train[1])
        order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
        return (picks for picks in order.split(self._batch) if len(picks) >= LEAST)

    def _floats(self, images: Tensor) -> Tensor:
        return images.to(self._setting.device).float().div_(127.5).sub_(1)


def measure_model(
    setting: Setting, model: str, modes: Sequence[str], pictures: Pictures, *, epochs: int, batch: int
) -> list[Trained]:
    """Train a model of torchvision in every mode, an epoch of each in turn, after a step of each that is not timed.

    Args:
        setting: no further epoch begins once its time is over.
        epochs: of each mode.
    """
    torch.manual_seed(0)
    module = build_model(f"torchvision:{model}", classes=2)
    students = [Student(copy.deepcopy(module).to(setting.device), mode, pictures, batch, setting) for mode in modes]
    for student in students:
        student.step()
    for epoch in range(epochs):
        for student in students:
            student.train(epoch)
            student.validate()
        if setting.left_s <= 0:
            break
    for student in students:
        student.time_copies()
    return [student.trained for student in students]


def rows(setting: Setting) -> Iterator[Row]:
    for part, model in setting.shared(setting.of(tuple(PUBLISHED), ("squeezenet1_1",))):
        found = attempt({"model": model}, functools.partial(_study, part, model))
        yield from found.get("rows", [found])


def _study(setting: Setting, model: str) -> Row:
    px = round(setting.of(224, 64) * LARGER.get(model, 1.0))
    modes, pictures = setting.of(MODES, ("none", "naive", "overlap")), Pictures.made(px, setting.of(160, 10))
    trained = measure_model(setting, model, modes, pictures, epochs=setting.of(4, 1), batch=setting.of(32, 4))
    none = trained[0]
    return {
        "rows": [
            {
                "model": model,
                **asdict(one),
                "training_s": sum(one.epochs_s),
                "ratio": statistics.median(a / b for a, b in zip(one.epochs_s, none.epochs_s, strict=True)),
                "published_ratio": published_ratio(model, one.mode),
            }
            for one in trained
        ]
    }


def published_ratio(model: str, mode: str) -> float | None:
    """Return seconds with ``mode`` over seconds without offload; None for what the study has not."""
    if model not in PUBLISHED or mode not in PUBLISHED_MODES:
        return None
    return PUBLISHED[model][PUBLISHED_MODES.index(mode)] / PUBLISHED[model][0]


def line(row: Row) -> tuple[str, ...]:
    return (
        row["model"],
        row["mode"],
        str(len(row["epochs_s"])),
        f"{row['training_s']:.2f}",
        f"{row['ratio']:.2f}",
        shown(row["published_ratio"], 1, 2),
        f"{row['best_accuracy']:.2f}",
        *(shown(row["copies"][f"{way}_bytes_per_s"], 1e9, 1) for way in ("out", "back")),
    )
