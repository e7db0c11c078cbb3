"""Forward passes of a trained model: in this process, whole or box by box, or on the ranks of a group, a stage each.

Takes uint8 tiles where they are read; returns logits where the last stage is. All ranks of a group look at the same
windows in the same order.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse

from app.settings.cli import RunError
from app.settings.optimization import OptimizerSettings
from app.training.engines import build_engine, build_optimizer
from models.losses import TileClassLoss
from parallel.comm.communicator import Communicator, agree
from parallel.comm.objects import broadcast_object
from parallel.comm.thread_comm import LocalCommunicator
from parallel.engine.step import Microbatch, TrainingEngine
from parallel.memory.policy import ActivationPolicy
from parallel.offload.host_memory import HostMemory
from parallel.profile.gpu import is_device_fault
from parallel.strategy import Strategy
from parallel.trace.stage_module import Boxes, as_tensor
from pipelines.slides.slide import SlideError
from pipelines.stream.device_batch import BoxMaker
from pipelines.stream.device_pixels import PixelMaker
from pipelines.tiles.stain import StainFit

log = logging.getLogger(__name__)

MOST_OFF = 1e-3
"""Of the largest output on the example: further from the module's own is no rounding, and the module is kept."""


@torch.inference_mode()
def with_folded_norms(module: nn.Module, example: Tensor) -> nn.Module:
    """Return ``module`` with its batch norms folded, or as it is where it cannot be traced or other values result.

    Args:
        module: in evaluation mode.
        example: (1, 3, h, w), on the module's device.
    """
    if not any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules()):
        return module
    try:
        folded: nn.Module = fuse(module)
        expected, given = module(example), folded(example)
        off = float((given - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
    except Exception as fault:  # whatever a user's own code raises when it is followed; it computes as it is
        log.info("batch norms stay layers of their own: %s: %s", type(fault).__name__, str(fault).partition("\n")[0])
        return module
    if not off <= MOST_OFF:
        log.info("batch norms stay layers of their own: folded, the model is %.2g off", off)
        return module
    return folded


@dataclass(frozen=True, eq=False)
class Placement:
    """Placement of a model over ranks in prediction.

    Attributes:
        stream: box size for windows, px; None: windows are computed whole.
        parameters: they lie on the host, and come to the device layer by layer.
        host: where maps lie that are computed box by box.
    """

    communicator: Communicator = field(default_factory=LocalCommunicator)
    stream: int | None = None
    parameters: bool = False
    host: HostMemory | None = None

    @property
    def is_local(self) -> bool:
        """One process computes the whole model on its device."""
        return self.communicator.world == 1 and self.stream is None and not self.parameters

    def strategy(self) -> Strategy:
        """Return the same as the engine takes it. Forward passes of all that split the model are alike."""
        ranks = self.communicator.world
        policy = ActivationPolicy(stream=self.stream, optimizer=self.parameters, parameters=self.parameters)
        return Strategy("gpipe" if ranks > 1 else "single", ranks, ranks, m=1, policy=policy, gradient_bytes=0)


Stains = tuple[StainFit, StainFit]
"""Stain that slides are made to look like, and stain of a slide."""


class Computation:
    """Forward passes of a model, whole or box by box, in this process or a group of ranks with a stage each.

    Attributes:
        reads, writes: tiles are wanted here, logits are had here.
        alone: no other rank computes the same slide.

    Args:
        pixels: returns what makes tiles the model's input, for stains; None: colours are not changed.
        autocast: type for mixed precision; None computes in the model's own.
        side: of usual tiles, px.
        batch: tiles computed together.
    """

    def __init__(
        self,
        module: nn.Module,
        placement: Placement,
        pixels: Callable[[Stains | None], PixelMaker],
        autocast: torch.dtype | None,
        side: int,
        batch: int,
    ) -> None:
        self._communicator, self._pixels, self._autocast = placement.communicator, pixels, autocast
        self.device, self._in_boxes = pixels(None).device, placement.stream is not None
        self.alone = placement.communicator.world == 1
        self._engine: TrainingEngine | None = None
        if placement.is_local:
            noise = np.random.default_rng(0).integers(256, size=(1, side, side, 3), dtype=np.uint8)
            self._module = with_folded_norms(module.to(self.device).eval(), as_tensor(self._input(noise, None)))
            self.reads = self.writes = True
            return
        self._engine = build_engine(
            placement.strategy(),
            module,
            TileClassLoss(None),
            lambda parameters: build_optimizer(OptimizerSettings(), parameters),
            placement.communicator,
            batch=batch,
            tile=side,
            seed=0,
            device=self.device,
            autocast=autocast,
            host=placement.host,
        )
        self.reads, self.writes = self._engine.predict_wants

    def logits(
        self, images: NDArray[np.uint8] | None, shape: tuple[int, ...], stains: Stains | None = None
    ) -> Tensor | None:
        """Return logits in float32, where ``writes``; a GPU may still be computing them.

        Args:
            images: uint8 (n, h, w, 3), where ``reads``.
            shape: (n, 3, h, w) of them, on every rank.
            stains: None: colours are not changed.
        """
        made = None if images is None else self._input(images, stains)
        logits: Tensor | None
        if self._engine is not None:
            logits = self._engine.predict(Microbatch(made, None, shape))
        else:
            mixed = torch.autocast(self.device.type, self._autocast, enabled=self._autocast is not None)
            with torch.inference_mode(), mixed:
                logits = self._module(made).float()
        return logits

    def _input(self, images: NDArray[np.uint8], stains: Stains | None) -> Tensor | Boxes:
        maker, tiles, rows = self._pixels(stains), torch.from_numpy(images), np.zeros(len(images), np.int64)
        if self._in_boxes:
            boxes, _ = BoxMaker(maker).make(tiles, None, rows, rows)
            assert boxes is not None
            return boxes
        # The host waits only for memory that is not page-locked.
        return maker.floats(tiles.to(self.device, non_blocking=True), maker.drawn(rows, rows))

    def broadcast(self, value: Any) -> Any:
        """Return the ``value`` of the rank that reads, on all ranks of the group."""
        return broadcast_object(self._communicator, value)

    @contextlib.contextmanager
    def fail_together(self) -> Iterator[None]:
        """If one rank of the group raises inside this block, all do."""
        try:
            yield
        except Exception:
            agree(self._communicator, True)
            raise
        if agree(self._communicator, False):
            raise SlideError("another rank that computes the model could not use the slide; it says why")


@contextlib.contextmanager
def rank_faults(slide_id: str, computation: Computation) -> Iterator[None]:
    """End the run if one rank of a group raises inside this block, where they compute together.

    Raises:
        RunError: there was one; of a slide that cannot be used and of the device, what was raised is left as it is.
    """
    try:
        yield
    except Exception as fault:
        if computation.alone or isinstance(fault, SlideError) or is_device_fault(fault):
            raise
        raise RunError(
            f"{slide_id}: {type(fault).__name__}: {fault}; ranks that compute a slide together cannot go on without "
            "one of them: start again for the slides that are left"
        ) from fault
