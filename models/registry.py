"""Models by name, and the pretrained weights that their libraries have for them.

Takes what ``--model`` takes: a name of ours, ``torchvision:NAME``, ``timm:NAME``, ``unet:TIMM_NAME`` (a U-Net over that
encoder), ``smp:DECODER(ENCODER)`` or ``package.module:factory``; gives a plain ``nn.Module`` from float (n, 3, h, w)
to logits: (n, classes), or (n, classes, h, w) for U-Nets, segmentation-models-pytorch and torchvision's segmentation
networks. To add a model, write its file and give it a line in ``OURS``. Libraries keep
weights in caches of their own (``$HF_HOME``, ``$TORCH_HOME``), which also serve machines without network.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import nn

from models.amoebanet import AmoebaNet
from models.blocks import Norm
from models.external import (
    FROM_TIMM,
    WITH_AUXILIARY_HEADS,
    build_from_factory,
    build_smp,
    build_timm,
    build_torchvision,
    create_timm,
    freeze_norms,
    is_on_hub,
    replace_norm,
    smp_weights,
)
from models.heads import Head, replace_pool
from models.resnet import BLOCKS_BY_DEPTH, ResNet, ResNetV2
from models.unet import UNet, UNetGPipe, build_encoder_unet
from models.weights import Weights

OURS: dict[str, tuple[Callable[..., nn.Module], tuple[str, ...]]] = {
    r"resnet(\d+)": (ResNet, tuple(f"resnet{depth}" for depth in BLOCKS_BY_DEPTH)),
    r"resnet(\d+)_v2": (ResNetV2, ("resnet110_v2", "resnet164_v2", "resnet1001_v2")),
    r"unet": (UNet, ("unet",)),
    r"unet_w(\d+)": (lambda base, **common: UNet(base=base, **common), ("unet_w16", "unet_w32")),
    r"unet\((\d+), *(\d+)\)": (UNetGPipe, ("unet(5,64)",)),
    r"amoebanet\((\d+), *(\d+)\)": (AmoebaNet, ("amoebanet(6,190)", "amoebanet(18,256)")),
}
"""Pattern of the name -> (constructor, which takes its numbers, classes and norm, names to show)."""

ELSEWHERE = ("unet:TIMM_NAME", "smp:DECODER(ENCODER)", "torchvision:NAME", "timm:NAME", "package.module:factory")


def model_names() -> tuple[str, ...]:
    """Return names of our own models; numbers in those of ResNet-v2 (9n+2), unet_w, unet(B,C), amoebanet(L,D) are
    free."""
    return tuple(name for _, shown in OURS.values() for name in shown)


def build_model(
    name: str, *, classes: int, norm: Norm = "batch", head: Head = "average", side: int | None = None
) -> nn.Module:
    """Return the model called ``name`` with random weights, on the current default device.

    Args:
        name: one of ``model_names()``, or as in ``ELSEWHERE``.
        classes: of the logits; 1 gives a single logit.
        norm: in our own models any; in others ``batch`` keeps what they have, ``group`` and ``layer`` replace their
            BatchNorm, and ``frozen`` keeps its running statistics as they are.
        head: what pools the last map of a classifier.
        side: of the tiles, px, for models of timm and torchvision that are made for one size; None: their own.

    Raises:
        ValueError: unknown name (close ones are named), or a setting the model does not take.
    """
    if classes < 1:
        raise ValueError(f"a model needs at least one class; got classes {classes}")
    ours = ((build, match) for pattern, (build, _) in OURS.items() if (match := re.fullmatch(pattern, name)))
    if found := next(ours, None):
        build, match = found
        model = build(*map(int, match.groups()), classes=classes, norm=norm)
    else:
        model = _foreign(name, classes, norm, side)
    replace_pool(model, name, head, side)
    return model


def _foreign(name: str, classes: int, norm: Norm, side: int | None) -> nn.Module:
    if ":" not in name:
        matches = difflib.get_close_matches(name, model_names(), n=3)
        hint = f"did you mean {' or '.join(matches)}? " if matches else ""
        raise ValueError(f"unknown model {name!r}; {hint}known are {', '.join((*model_names(), *ELSEWHERE))}")
    source, _, rest = name.partition(":")
    if norm == "instance":
        raise ValueError(
            f"--norm instance is for MegaTile's own models; model {name} takes batch, group, frozen or layer"
        )
    if source == "torchvision":
        model = build_torchvision(rest, classes=classes, side=side)
    elif source == "timm":
        model = build_timm(rest, classes=classes, side=side)
    elif source == "smp":
        model = build_smp(rest, classes=classes)
    elif source == "unet":
        model = build_encoder_unet(rest, classes=classes, side=side)
    else:
        model = build_from_factory(name, classes=classes)
    if norm in ("group", "layer"):
        replace_norm(model, name, norm)
    if norm == "frozen":
        freeze_norms(model, name)
    return model


PRETRAINED = "pretrained"
"""Value of ``--weights`` that stands for the weights of the model's library."""

CENTRED = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
"""Of models that torchvision took from TensorFlow: its ``transform_input`` changes from ``IMAGENET`` to these."""


def names_weights(name: str) -> bool:
    """Return whether a model's name names weights, too: a tag such as ``timm:resnet18.a1_in1k``, or ``hf-hub:``."""
    source, _, rest = name.partition(":")
    if source == "smp" and (encoder := re.search(rf"\({FROM_TIMM}(.*)\)", rest)):
        return "." in encoder[1]
    return source in ("timm", "unet") and (is_on_hub(rest) or "." in rest)


def pretrained_weights(name: str, side: int | None = None) -> Weights:
    """Return the weights that the library of model ``name`` has for it.

    Args:
        side: of the tiles, px, for models that are made for one size; position embeddings are interpolated to it.

    Raises:
        ValueError: the model is of no such library, has no pretrained weights, or they cannot be downloaded.
    """
    source, _, rest = name.partition(":")
    of_torchvision = re.fullmatch(r"resnet(\d+)", name)
    if of_torchvision and int(of_torchvision[1]) in BLOCKS_BY_DEPTH:
        source, rest = "torchvision", name
    loaders = {"timm": _from_timm, "unet": _from_timm, "torchvision": _from_torchvision, "smp": _from_smp}
    if source not in loaders:
        raise ValueError(
            f"--weights {PRETRAINED}: no library has weights for model {name}; give --weights FILE, or a model of timm "
            "(timm:NAME, unet:NAME), torchvision (torchvision:NAME, resnet18 to resnet152) or smp:DECODER(ENCODER)"
        )
    hub = Path(torch.hub.get_dir())
    lock = FileLock(hub / ".megatile.lock")  # the ranks of a machine download once
    try:
        with contextlib.suppress(OSError):  # a cache of others, or read-only: its weights can be read
            hub.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        return loaders[source](rest, side, source == "unet")
    except Exception as fault:  # network, cache and hub fail in many ways, each with a class of its own
        reason = (str(fault).strip().splitlines() or [""])[0][:200]
        raise ValueError(
            f"--weights {PRETRAINED}: the weights of {name} cannot be loaded: {type(fault).__name__}: {reason}. "
            "Without network, copy the cache of a machine that has them ($HF_HOME, $TORCH_HOME) and set "
            "HF_HUB_OFFLINE=1; a gated model needs $HF_TOKEN; or give --weights FILE"
        ) from fault
    finally:
        lock.release()


def _from_timm(name: str, side: int | None, features: bool) -> Weights:
    options = {"features_only": True} if features else {}
    model: Any = create_timm(name, side, pretrained=True, **options)
    return Weights(model.state_dict(), f"timm {name}", _normalisation(model.pretrained_cfg))


def timm_normalisation(model: nn.Module) -> tuple[Sequence[float], Sequence[float]] | None:
    """Return mean and standard deviation that timm records for ``model`` or its encoder; None: neither is of timm."""
    settings = next(filter(None, (getattr(part, "pretrained_cfg", None) for part in model.modules())), None)
    return _normalisation(settings) if settings else None


def _from_torchvision(name: str, side: int | None, _: bool) -> Weights:
    from torchvision import models
    from torchvision.models.vision_transformer import interpolate_embeddings

    weights: Any = models.get_model_weights(name).DEFAULT
    tensors = weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
    if side and name.startswith("vit_"):
        patch = tensors["conv_proj.weight"].shape[-1]
        tensors = interpolate_embeddings(side, patch, tensors)
    centred = name in WITH_AUXILIARY_HEADS
    transforms = weights.transforms()
    normalisation = CENTRED if centred else (tuple(transforms.mean), tuple(transforms.std))
    return Weights(tensors, f"torchvision {weights}", normalisation)


def _from_smp(name: str, side: int | None, _: bool) -> Weights:
    from segmentation_models_pytorch.encoders import get_preprocessing_params

    network = build_smp(name, classes=1, pretrained=True)
    encoder = name.partition("(")[2].removesuffix(")")
    tensors = {key: value for key, value in network.state_dict().items() if key.startswith("encoder.")}
    weights = smp_weights(encoder)
    settings = get_preprocessing_params(encoder, weights if isinstance(weights, str) else "imagenet")
    return Weights(tensors, f"smp {encoder}", _normalisation(settings))


def _normalisation(settings: Mapping[str, Any]) -> tuple[Sequence[float], Sequence[float]]:
    """Return mean and standard deviation from the settings of timm or smp."""
    if settings.get("input_space", "RGB") != "RGB":
        raise ValueError(f"the weights expect {settings['input_space']} images, and tiles are RGB")
    scale = max(settings.get("input_range") or (1,))
    return tuple(v / scale for v in settings["mean"]), tuple(v / scale for v in settings["std"])
