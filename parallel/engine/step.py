"""Interface between the training loop and the engine that computes a step, whatever the strategy.

An engine takes the microbatches of this rank's group and returns the loss of the whole global batch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from parallel.comm.communicator import Communicator
from parallel.schedule.action import Schedule
from parallel.schedule.shares import Shares
from parallel.schedule.text import Push
from parallel.space.team import Box
from parallel.streaming.box_sums import Sums
from parallel.trace.stage_module import Boxes, as_tensor


class EngineFault(RuntimeError):
    """An action that failed: rank, action, stage and shapes, and the schedule with the action marked."""


class NonFiniteLoss(ArithmeticError):
    """A loss that is NaN or infinite. Parameters and optimizer are as they were before the step, unless ``updated``.

    Attributes:
        microbatches: which of the step's microbatches, over all ranks, were not finite.
        losses: their values.
        updated: every microbatch has updated the parameters, those that were not finite among them.
    """

    updated = False

    def __init__(self, microbatches: list[int], losses: list[float]) -> None:
        super().__init__(f"loss {losses} in microbatches {microbatches}")
        self.microbatches = microbatches
        self.losses = losses


class NeededInputs(NamedTuple):
    """Parts of a microbatch that a rank needs; the others are not read for it."""

    images: bool
    targets: bool


class Microbatch(NamedTuple):
    """Tiles that go through a stage together, as one rank holds them.

    Attributes:
        images: (n, 3, h, w) on the device, whole or by boxes; None where this rank does not need them.
        targets: of the loss, those of pixels whole or by boxes; None where this rank does not need them.
        shape: (n, 3, h, w) of the images, on every rank alike.
    """

    images: Tensor | Boxes | None
    targets: Tensor | Boxes | None
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Figures of a step.

    Attributes:
        loss: mean over the global batch, the same on every rank.
        tiles: that this rank counts; every tile trained on is counted by one rank.
        seconds: (microbatch of the rank's group, seconds without the wait for other groups); empty: not known.
        waited_s: from the end of its own computing until it had the sums of all groups' gradients; None: not known.
        pushes: updates of a parameter server in the step, in order; on rank 0.
    """

    loss: float
    tiles: int
    seconds: tuple[tuple[int, float], ...] = ()
    waited_s: float | None = None
    pushes: tuple[Push, ...] = field(default=(), kw_only=True)


def microbatch_seed(seed: int, step: int, i: int) -> int:
    """Return a 63-bit seed for microbatch ``i`` of ``step``: dropout is the same whichever rank computes it."""
    digest = hashlib.blake2b(f"{seed}/{step}/{i}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def measured(output: Any, microbatch: Microbatch, sums: Sums | None) -> Any:
    """Return ``output``, or the ``sums`` of ``output`` and the targets."""
    if sums is None or output is None:
        return output
    assert microbatch.targets is not None
    return sums(output, as_tensor(microbatch.targets))


def missing_microbatch(number: int) -> ValueError:
    """Return the error for a step that was given too few microbatches."""
    return ValueError(f"microbatch {number} is missing: give engine.step one for each number in engine.share, in order")


def read_losses(losses: Mapping[int, tuple[Tensor, int]], m: int) -> Tensor:
    """Return the mean losses and the sizes of ``m`` microbatches, float64 (2, m) on the CPU, 0 where there is none.

    Args:
        losses: of microbatches, and how many tiles each has. They are read from the device in one copy.
    """
    table = torch.zeros((2, m), dtype=torch.float64)
    if losses:
        means, sizes = zip(*losses.values(), strict=True)
        numbers = list(losses)
        table[0, numbers] = torch.stack([mean.reshape(()) for mean in means]).cpu().double()
        table[1, numbers] = torch.tensor(sizes, dtype=torch.float64)
    return table


def mean_loss(communicator: Communicator, table: Tensor) -> float:
    """Return the mean loss over all tiles of a step; every rank calls it.

    Args:
        table: what ``read_losses`` gave on this rank; that of all ranks afterwards.

    Raises:
        NonFiniteLoss: on every rank alike.
    """
    communicator.all_reduce(table)
    means, sizes = table
    faulty = [i for i, mean in enumerate(means.tolist()) if not math.isfinite(mean)]
    if faulty:
        raise NonFiniteLoss(faulty, [float(means[i]) for i in faulty])
    return float(means @ (sizes / sizes.sum()))


class Observer(Protocol):
    """Watchdog that is notified of every action, and reports the last one when the engine hangs."""

    def follow(self, schedule: Schedule) -> None:
        """Positions are from now on those in ``schedule``, all ranks' actions of a step."""

    def at(self, position: int, waiting: bool = False, shapes: str = "") -> None:
        """Before the action at ``position`` of this rank's list; ``waiting``: for other ranks."""


class TrainingEngine(Protocol):
    """One optimiser step of a model over a fixed group of ranks."""

    share: Sequence[int]
    """Microbatches of the global batch that this rank's group of ranks computes, rising."""

    counted: bool
    """Losses and tiles of this rank are counted; members of a team read parts of the same tiles, and one counts."""

    def reshare(self, shares: Shares) -> None:
        """Let groups of ranks compute these microbatches from the next step on; all ranks call it together."""
        raise AssertionError(f"the shares of {type(self).__name__} are fixed")

    def samples(self, count: int) -> range:
        """Return the tiles of a microbatch of ``count`` that this rank needs when training; it may be given them alone,
        as a microbatch whose ``shape`` has all."""
        return range(count)

    def wants(self, i: int) -> NeededInputs:
        """Return the parts of microbatch ``i`` of its share that this rank needs when training."""

    def parts(self, shape: tuple[int, ...]) -> tuple[Box | None, Box | None]:
        """Return rows and columns that this rank needs of a tile of ``shape`` (n, 3, h, w), and of its mask; None:
        all."""
        return None, None

    @property
    def predict_wants(self) -> NeededInputs:
        """Parts of a microbatch that this rank needs when predicting: images as inputs, targets to compare with."""

    def step(self, microbatches: Iterable[Microbatch], step: int, learning_rate: float) -> StepResult:
        """Forward, backward and update on one global batch.

        Args:
            microbatches: those of ``share``, in order; drawn lazily. Sizes and tile shapes may differ from step to step
                and from microbatch to microbatch.
            step: number of the step, from 0; seeds the random numbers of each microbatch.
            learning_rate: for this update.

        Raises:
            NonFiniteLoss: on every rank alike, before anything was updated.
        """

    def predicting(self) -> AbstractContextManager[None]:
        """Around the predictions of every rank: all enter and leave it together, each with its own number of them."""
        return nullcontext()

    def predict(self, microbatch: Microbatch, sums: Sums | None = None) -> Any:
        """Output of the model in evaluation mode, float32, without gradients; every rank of the group takes part.

        Args:
            sums: (output, targets) -> (n, K), to which boxes of the tile add up: returned in place of the output,
                which then is never held whole.

        Returns:
            The output on ranks whose ``predict_wants`` has targets, but for members of a team that are not
            ``counted``; None on the others.
        """

    def averaged(self) -> AbstractContextManager[None]:
        """Around predictions between two steps: parameters have the values of their running averages, where the
        optimizer keeps any (``weight_average``). All ranks enter and leave it together."""

    def on_device(self) -> Iterator[Tensor]:
        """Yield all tensors on this rank's device between two steps: of parameters, buffers, gradients, optimizer."""

    @property
    def sent_in_step(self) -> int:
        """Bytes that this rank sent in the last step: values and gradients as messages, and its part of the sums of
        gradients as a ring sends them."""

    def before_update(self, call: Callable[[], None]) -> None:
        """Run ``call`` in every step from now on before any parameter or optimizer state changes, on the thread that
        changes it; the step waits for it."""

    @property
    def parameter_names(self) -> frozenset[str]:
        """Names in ``state_dict()["model"]`` of all that only updates change; forward passes may change the others."""

    def state_dict(self) -> dict[str, Any]:
        """Parameters, buffers and optimizer state: ``model`` and ``optimizer`` as the plain module and a plain
        optimizer over its parameters give them, whatever the strategy. Every rank takes part; only rank 0 gets it,
        the others get {}.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what ``state_dict`` of any strategy returned; every rank is given all of it."""

    def close(self) -> None:
        """Release what a step that was given up left. No step can follow."""
        return


class StepBatches:
    """Hands out the parts of the microbatches ``share``, each once, in any order.

    Args:
        microbatches: drawn as far as is needed, no further.
        samples: as of ``TrainingEngine``.
    """

    def __init__(
        self, microbatches: Iterable[Microbatch], share: Iterable[int], samples: Callable[[int], range] = range
    ) -> None:
        self._samples = samples
        self._numbers, self._source = iter(share), iter(microbatches)
        self._shapes: dict[int, tuple[int, ...]] = {}
        self._images: dict[int, Tensor | Boxes | None] = {}
        self._targets: dict[int, Tensor | Boxes | None] = {}

    def shape(self, i: int) -> tuple[int, ...]:
        """(n, 3, h, w) of microbatch ``i``."""
        while i not in self._shapes:
            number = next(self._numbers)
            try:
                self._images[number], self._targets[number], self._shapes[number] = next(self._source)
            except StopIteration:
                raise missing_microbatch(number) from None
        return self._shapes[i]

    def images(self, i: int) -> Tensor | Boxes:
        """Return the images of microbatch ``i``, whose shape was asked for before.

        Raises:
            ValueError: they have another shape than was announced to the other ranks.
        """
        images, shape = self._images.pop(i), self._shapes[i]
        assert images is not None, "this rank wants the images"
        if tuple(images.shape) not in (shape, (len(self._samples(shape[0])), *shape[1:])):
            raise ValueError(f"microbatch {i} was announced as {shape} and holds images {tuple(images.shape)}")
        return images

    def targets(self, i: int) -> Tensor | Boxes:
        """Return the targets of microbatch ``i``, whose shape was asked for before."""
        targets = self._targets.pop(i)
        assert targets is not None, "this rank wants the targets"
        return targets
