"""Pretrained weights of timm, torchvision and segmentation-models-pytorch: what ``--weights pretrained`` loads.

Each library downloads them and keeps them in its own cache (``$HF_HOME``, ``$TORCH_HOME``), which also serves machines
without network. A gated model of the Hugging Face hub needs a token in ``$HF_TOKEN``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from models.external import FROM_TIMM, WITH_AUXILIARY_HEADS, build_smp, create_timm, is_on_hub, smp_weights
from models.resnet import BLOCKS_BY_DEPTH
from models.weights import Weights

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
    hub.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(hub / ".megatile.lock"):  # the ranks of a machine download once
            return loaders[source](rest, side, source == "unet")
    except Exception as fault:  # network, cache and hub fail in many ways, each with a class of its own
        reason = (str(fault).strip().splitlines() or [""])[0][:200]
        raise ValueError(
            f"--weights {PRETRAINED}: the weights of {name} cannot be loaded: {type(fault).__name__}: {reason}. "
            "Without network, copy the cache of a machine that has them ($HF_HOME, $TORCH_HOME) and set "
            "HF_HUB_OFFLINE=1; a gated model needs $HF_TOKEN; or give --weights FILE"
        ) from fault


def _from_timm(name: str, side: int | None, features: bool) -> Weights:
    options = {"features_only": True} if features else {}
    model: Any = create_timm(name, side, pretrained=True, **options)
    return Weights(model.state_dict(), f"timm {name}", _normalisation(model.pretrained_cfg))


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

    network = build_smp(name, classes=1, in_channels=3, pretrained=True)
    encoder = name.partition("(")[2].removesuffix(")")
    tensors = {key: value for key, value in network.state_dict().items() if key.startswith("encoder.")}
    weights = smp_weights(encoder)
    settings = get_preprocessing_params(encoder, weights if isinstance(weights, str) else "imagenet")
    return Weights(tensors, f"smp {encoder}", _normalisation(settings))


def _normalisation(settings: Mapping[str, Any]) -> tuple[Sequence[float], Sequence[float]]:
    """Return mean and standard deviation from the settings of timm or smp."""
    if settings.get("input_space", "RGB") != "RGB":
        raise ValueError(f"they expect {settings['input_space']} images, and tiles are RGB")
    scale = max(settings.get("input_range") or (1,))
    return tuple(v / scale for v in settings["mean"]), tuple(v / scale for v in settings["std"])
