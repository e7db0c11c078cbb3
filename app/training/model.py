"""The model of a run and its loss: built by name, with the weights it starts from, in the layout it is computed in.

Takes settings and the classes of a dataset; returns a module on the CPU, the same on every rank, and what the user
should know about how it was made.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from app.checkpoint.file import check_weights
from app.settings.optimization import ModelSettings, OptimizerSettings
from app.settings.run import RunConfig
from app.training.dataset import Dataset, class_counts
from app.training.share import share
from models.heads import BagLoss, bag_head_path, put_bag_head
from models.layer_depth import freeze, layer_decay_scales, layers_of
from models.losses import PixelClassLoss, TileClassLoss, balanced_weights
from models.registry import PRETRAINED, build_model, names_weights, pretrained_weights, timm_normalisation
from models.weights import IMAGENET, LoadedWeights, Weights, block_of, load_weights, read_weights
from parallel.comm.communicator import Communicator
from parallel.trace.op_recorder import draws
from parallel.trace.updated_search import updated_buffers
from parallel.trace.without_data import exclusively, preserve_module_state, refuse_tile_size, run_without_data

log = logging.getLogger(__name__)


def takes_channels_last(model: nn.Module, shape: tuple[int, ...]) -> bool:
    """Return False where ``model`` runs on images that lie channel by channel, and not on channels_last ones.

    Args:
        shape: (n, c, h, w) of a microbatch.
    """
    return _runs(model, shape, torch.channels_last) or not _runs(model, shape, torch.contiguous_format)


def _runs(model: nn.Module, shape: tuple[int, ...], layout: torch.memory_format) -> bool:
    try:
        run_without_data(model, shape, layout)
    except Exception:  # whatever torch raises for a layout, and what a model that looks at its data does
        return False
    return True


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if draws(func, args, kwargs):
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **kwargs)


def refuse_draws(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Let no rank of a mixed run compute other numbers than the next one would.

    Args:
        shape: (n, c, h, w) of a microbatch.

    Raises:
        ValueError: a training pass of ``model`` draws, or cannot be looked into.
    """
    watch = _Draws()
    with preserve_module_state(model):
        model.train()
        try:
            run_without_data(model, shape, watch=watch)
        except Exception as fault:  # whatever torch raises, and what a model that looks at its data does
            raise ValueError(
                "--device mixed: the model could not be looked into for random numbers, which a CPU and a GPU draw "
                f"differently ({str(fault).splitlines()[0] if str(fault) else type(fault).__name__}): use devices of "
                "one kind"
            ) from fault
    if drawn := ", ".join(dict.fromkeys(watch.names)):
        raise ValueError(
            f"--device mixed: the model draws random numbers ({drawn}), and a CPU and a "
            "GPU draw others from one seed, so that the step would depend on who computes what: use a model without "
            "dropout, or devices of one kind"
        )


def refuse_second_update(model: nn.Module, shape: tuple[int, ...], communicator: Communicator) -> None:
    """Refuse a model whose state the two forward passes of ``--bag`` would update twice; every rank calls it.

    Args:
        shape: (n, c, h, w) of a microbatch.

    Raises:
        ValueError: names the state.
    """
    with exclusively(communicator), preserve_module_state(model):
        model.train()
        updated = updated_buffers(model, shape, next(model.parameters()).dtype.to_real())
    if updated:
        raise ValueError(
            f"the model's forward pass updates {', '.join(updated)}: --bag makes two forward passes, and the second "
            "would differ; leave --bag out, or choose another model"
        )


@dataclass(frozen=True, eq=False)
class RunModel:
    """Facts of a model that is ready for an engine.

    Attributes:
        parameters: number of them.
        scales: of the learning rate, by name of the parameter; those that are missing have 1.
        channels_last: it is to be given images in that layout.
        loaded: the weights that it starts from; None: as they were drawn.
        normalisation: mean and standard deviation, of R, G and B from 0 to 1, that it is given images with.
        notes: what the user should know about how it was made.
    """

    parameters: int
    scales: Mapping[str, float]
    channels_last: bool
    loaded: LoadedWeights | None
    normalisation: tuple[Sequence[float], Sequence[float]]
    notes: tuple[str, ...]


def build_run_model(config: RunConfig, classes: int, shape: tuple[int, ...]) -> tuple[nn.Module, RunModel]:
    """Return the model of ``config``, drawn from its seed, and its facts.

    Args:
        shape: (n, 3, h, w) of a microbatch of the largest tiles.

    Raises:
        ValueError: a model or weights file that does not fit, or parts that it does not have.
    """
    torch.manual_seed(config.seed)
    net, settings, loaded = config.net, config.optimization, None
    notes: list[str] = []
    side = None if config.index.tile == "slide" else shape[2]
    module = build_model(net.model, classes=classes, norm=net.norm, head=net.head, side=side)
    weights = _weights_of(net, side)
    trained_in_bags = weights is not None and bag_head_path(weights.tensors) is not None
    if config.stream.bag and trained_in_bags:
        put_bag_head(module, net.model, classes)
    refuse_tile_size(module, net.model, shape)
    if weights is not None:
        loaded = load_weights(module, weights)
        notes += loaded.lines
    elif net.norm == "frozen":
        notes.append(
            "--norm frozen without --weights: the running statistics were never measured (mean 0, variance 1), so the "
            "first losses may be large; give --weights pretrained or --weights FILE"
        )
    if config.stream.bag and not trained_in_bags:  # other weights have the names of a model without it
        put_bag_head(module, net.model, classes)
    recorded = IMAGENET if weights is None else weights.normalisation
    of_timm = timm_normalisation(module) if recorded is None else None
    normalisation = recorded or of_timm or IMAGENET
    if recorded != IMAGENET:
        mean, std = (", ".join(f"{value:g}" for value in values) for values in normalisation)
        what = "the weights expect"
        if recorded is None:
            what = f"timm's weights of {net.model} expect" if of_timm else "most weights of ImageNet expect"
            what += f" ({net.weights} does not say)"
        notes.append(f"images are normalised as {what}: mean {mean}; standard deviation {std}")
    parameters = sum(parameter.numel() for parameter in module.parameters())
    if settings.freeze:
        frozen = freeze(module, settings.freeze)
        trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
        random = _random_parts(frozen, loaded)
        notes.append(f"--freeze {' '.join(settings.freeze)}: {trained:,} of {parameters:,} numbers are trained{random}")
    scales = {} if settings.layer_decay == 1 else layer_decay_scales(module, settings.layer_decay)
    if scales:
        depth, least = len(layers_of(module)), min(scales.values())
        notes.append(f"--layer-decay {settings.layer_decay:g}: {depth} layers, the first at {least:.2g} of the rate")
    if config.strategy.is_mixed:
        refuse_draws(module, shape)
    channels_last = config.strategy.channels_last and takes_channels_last(module, shape)
    if channels_last:
        module.to(memory_format=torch.channels_last)
    elif config.strategy.channels_last:
        notes.append(
            "channels_last is left out: the model takes its images apart in a way that this layout does not allow "
            "(view after a convolution, say); reshape in place of view would make it faster"
        )
    return module, RunModel(parameters, scales, channels_last, loaded, normalisation, tuple(notes))


def _random_parts(frozen: Sequence[str], loaded: LoadedWeights | None) -> str:
    """Return what to say of ``frozen`` parameters that stay as they were drawn; empty where there are none."""
    if loaded is None:
        return "; without --weights the rest stays as the model is built"
    drawn = [name for name in frozen if name in loaded.drawn]
    if not drawn:
        return ""
    blocks = dict.fromkeys(block_of(name, loaded.part) for name in drawn)
    random = {name.partition(".")[0] for name in drawn}
    others = dict.fromkeys(module for name in frozen if (module := name.partition(".")[0]) not in random)
    advice = f"; use --freeze {' '.join(others)}" if others else ""
    return f"; frozen at random, as no weights were loaded there: {', '.join(blocks)}{advice}"


def _weights_of(net: ModelSettings, side: int | None) -> Weights | None:
    if net.weights == PRETRAINED or (net.weights is None and names_weights(net.model)):
        return pretrained_weights(net.model, side)
    if net.weights is None:
        return None
    check_weights(Path(net.weights))
    return read_weights(Path(net.weights))


def build_loss(
    settings: OptimizerSettings,
    dataset: Dataset,
    train_rows: NDArray[np.int64],
    communicator: Communicator,
    *,
    in_bags: bool = False,
    by_slide: bool = False,
) -> TileClassLoss | PixelClassLoss:
    """Return the loss of ``dataset``'s task; class weights are those of the tiles ``train_rows``, or of their slides,
    as the first rank counts them: what one rank cannot read another may, and all need the same weights.

    Args:
        in_bags: a sample is a bag of a slide.
        by_slide: slides are drawn equally often; slides with labels are then counted.

    Raises:
        ValueError: ``settings.loss`` is of another task.
    """
    weights = None
    if settings.class_weights == "balanced":
        of_slides = in_bags or (by_slide and bool(dataset.slide_labels))
        weights = balanced_weights(share(communicator, lambda: class_counts(dataset, train_rows, of_slides=of_slides)))
        of_classes = zip(dataset.classes, weights.tolist(), strict=True)
        log.info("--class-weights balanced: %s", ", ".join(f"{name} {weight:.3g}" for name, weight in of_classes))
    smoothing, gamma = settings.label_smoothing, settings.focal_gamma if settings.loss == "focal" else 0.0
    if dataset.task == "segment":
        dice = settings.loss in ("auto", "dice_ce")
        return PixelClassLoss(weights, dice=dice, label_smoothing=smoothing, gamma=gamma)
    if settings.loss == "dice_ce":
        raise ValueError(
            "--loss dice_ce is of the overlap of areas, and tiles of one class each have none (--task classify): use "
            "--loss cross_entropy or focal, or --task segment with annotations"
        )
    kind = BagLoss if in_bags else TileClassLoss
    return kind(weights, label_smoothing=smoothing, gamma=gamma)
