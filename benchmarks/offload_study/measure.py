"""One model of the study trained in every mode, epoch by epoch in turn: seconds, accuracy, and the copies.

Takes pictures and a model's name; gives a row per mode. Modes start from the same weights and see the same batches, so
that losses differ by nothing but the order of a GPU's sums. The copies are timed in epochs of their own after the
others, because reading a clock at every copy takes time too.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.offload_study import naive
from benchmarks.offload_study.pictures import Pictures
from benchmarks.whole_engine import whole_engine
from models.registry import build_model
from parallel.comm.thread_comm import LocalCommunicator
from parallel.engine.step import Microbatch
from parallel.memory.policy import ActivationPolicy
from parallel.offload.copies import CopyClock, CopyTime

LEARNING_RATE, MOMENTUM = 0.001, 0.9
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LEAST = 2
"""Pictures of the last batch of an epoch below which it is left out: BatchNorm takes no fewer."""
TIMED_STEPS = 2
"""Of each mode, in which every copy is timed."""


@dataclass
class Trained:
    """One model in one mode.

    Attributes:
        epochs_s: of training, by epoch.
        losses: of every step.
        best_accuracy: of the validation pictures, of any epoch.
        copies: direction -> what ``copy_figures`` gives, of ``timed_steps`` steps; empty where nothing is copied.
        peak_bytes: that the device's allocator gave out at most in an epoch, over what it had before; None on a CPU.
    """

    mode: str
    epochs_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    best_accuracy: float = 0.0
    copies: dict[str, dict[str, float]] = field(default_factory=dict)
    timed_steps: int = 0
    peak_bytes: int | None = None


class Student:
    """A model in one mode, at work.

    Args:
        module: of its own, on the device.
        pictures: on the CPU.
        batch: pictures of a step.
    """

    def __init__(self, module: nn.Module, mode: str, pictures: Pictures, batch: int, device: torch.device) -> None:
        self.trained = Trained(mode)
        self._pictures, self._batch, self._device = pictures, batch, device
        self._optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
        self._engine = whole_engine(
            module,
            F.cross_entropy,
            lambda _: self._optimizer,
            LocalCommunicator(),
            batch=batch,
            m=1,
            shape=(batch, *pictures.train.shape[1:]),
            device=device,
            policy=ActivationPolicy(offload="overlap" if mode == "overlap" else "none"),
        )
        self._naive = None
        if mode in naive.MODES:
            self._naive = naive.NaiveOffload(mode, device, (*module.parameters(), *module.buffers()))
        saved_tensors = self._engine._work.stages[0]._saved_tensors
        self._clock = self._naive.clock if self._naive else saved_tensors.copies.clock if saved_tensors else CopyClock()
        self._steps = 0
        self._scale = torch.tensor([1 / (255 * std) for std in STD], device=device)[:, None, None]
        self._offset = torch.tensor([-mean / std for mean, std in zip(MEAN, STD, strict=True)], device=device)
        self._offset = self._offset[:, None, None]

    def warm_up(self) -> None:
        """One step."""
        self._step(next(self._batches(0)))

    def train(self, epoch: int) -> None:
        """Go once through the training pictures, timed."""
        settle(self._device)
        before_bytes = 0
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            before_bytes = torch.cuda.memory_allocated(self._device)
        began_s = time.perf_counter()
        for picks in self._batches(epoch):
            self._step(picks)
        settle(self._device)
        self.trained.epochs_s.append(time.perf_counter() - began_s)
        if self._device.type == "cuda":
            self.trained.peak_bytes = torch.cuda.max_memory_allocated(self._device) - before_bytes
        self._optimizer.zero_grad(set_to_none=True)  # room for the other modes

    def validate(self) -> None:
        right = 0
        images, labels = self._pictures.val, self._pictures.val_labels
        for part, of_part in zip(images.split(self._batch), labels.split(self._batch), strict=True):
            logits = self._engine.predict(Microbatch(self._floats(part), None, tuple(part.shape)))
            right += int((logits.argmax(1).cpu() == of_part).sum())
        self.trained.best_accuracy = max(right / len(labels), self.trained.best_accuracy)

    def time_copies(self) -> None:
        """Take a few more steps, and the time of every copy."""
        if self.trained.mode == "none":
            return
        self._clock.times.clear()
        self._clock.on = True
        for picks in itertools.islice(self._batches(0), TIMED_STEPS):
            self._step(picks)
            self.trained.timed_steps += 1
        settle(self._device)
        self.trained.copies = copy_figures(self._clock.times)
        self._clock.on = False

    def close(self) -> None:
        self._engine.close()

    def _batches(self, epoch: int) -> Iterator[Tensor]:
        order = torch.randperm(len(self._pictures.train), generator=torch.Generator().manual_seed(epoch))
        return (picks for picks in order.split(self._batch) if len(picks) >= LEAST)

    def _step(self, picks: Tensor) -> None:
        images = self._pictures.train[picks]
        labels = self._pictures.train_labels[picks].to(self._device)
        part = Microbatch(self._floats(images), labels, tuple(images.shape))
        with self._naive.moving() if self._naive else contextlib.nullcontext():
            result = self._engine.step([part], self._steps, LEARNING_RATE)
        self.trained.losses.append(result.loss)
        self._steps += 1

    def _floats(self, images: Tensor) -> Tensor:
        return images.to(self._device).float().mul_(self._scale).add_(self._offset)


def measure_model(
    model: str,
    modes: Sequence[str],
    pictures: Pictures,
    *,
    epochs: int,
    batch: int,
    device: torch.device,
    enough: Callable[[], bool] = lambda: False,
) -> list[Trained]:
    """``model`` in every mode, an epoch of each in turn, after a step of each that is not timed.

    Args:
        model: of torchvision.
        epochs: of each mode.
        enough: asked after each round of epochs; True ends training there.
    """
    torch.manual_seed(0)
    module = build_model(f"torchvision:{model}", classes=len(pictures.classes))
    students = [Student(copy.deepcopy(module).to(device), mode, pictures, batch, device) for mode in modes]
    for student in students:
        student.warm_up()
    for epoch in range(epochs):
        for student in students:
            student.train(epoch)
            student.validate()
        if enough():
            break
    for student in students:
        student.time_copies()
        student.close()
    return [student.trained for student in students]


def copy_figures(times: Sequence[CopyTime]) -> dict[str, dict[str, float]]:
    """Direction, "out" or "back" -> seconds and bytes per second of the copies: mean, most, least, median."""
    found = {}
    for direction in ("out", "back"):
        own = [one for one in times if one.direction == direction]
        if not own:
            continue
        found[direction] = {
            "copies": len(own),
            "bytes": sum(one.bytes for one in own),
            **{f"{name}_s": of([one.seconds for one in own]) for name, of in FIGURES.items()},
            **{f"{name}_bytes_per_s": of([one.bandwidth for one in own]) for name, of in FIGURES.items()},
        }
    return found


FIGURES: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "max": max,
    "min": min,
    "median": statistics.median,
}


def settle(device: torch.device) -> None:
    """Wait for what the device has been given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
