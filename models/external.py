"""Models that are not ours: torchvision, timm, segmentation-models-pytorch, and a user's own factory.

Takes a name and the number of classes; gives a module whose forward returns one tensor: logits (n, classes), or
(n, classes, h, w) for segmentation. Weights are random until ``weights.load_weights``; of models named ``hf-hub:`` the
configuration is read from the hub, or from its cache.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from models.blocks import ChannelNorm, FrozenBatchNorm2d, Norm, group_count, stay_in_evaluation

WITH_AUXILIARY_HEADS = ("googlenet", "inception_v3")
"""torchvision classifiers that return a tuple in training unless told otherwise, and warn about initialisation."""

SHOWN_NAMES = 24
"""timm alone knows over a thousand."""

FROM_TIMM = "tu-"
"""How segmentation-models-pytorch begins the names of encoders that it takes from timm."""


class TorchvisionSegmenter(nn.Module):
    """A torchvision segmentation network that returns its main logits: (n, 3, h, w) -> (n, classes, h, w).

    Has torchvision's parameter names; the auxiliary head is gone.
    """

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.backbone, self.classifier = network.backbone, network.classifier
        # LR-ASPP's classifier takes two resolutions, that of FCN and DeepLab the last one.
        self.takes_all_features = type(network).__name__ == "LRASPP"

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, classes, h, w)."""
        features = self.backbone(x)
        logits = self.classifier(features if self.takes_all_features else features["out"])
        return F.interpolate(logits, size=x.shape[-2:], mode="bilinear", align_corners=False)


def build_torchvision(name: str, *, classes: int, side: int | None = None) -> nn.Module:
    """Return a classification or segmentation model of torchvision by its name there, as ``build_model`` says.

    Raises:
        ValueError: torchvision has no such model, or it is of another kind (detection, video, quantized).
    """
    from torchvision import models

    classifiers = models.list_models(module=models)
    segmenters = models.list_models(module=models.segmentation)
    if name in segmenters:
        network = models.get_model(name, weights=None, weights_backbone=None, num_classes=classes)
        return TorchvisionSegmenter(network)
    if name not in classifiers:
        known = [*classifiers, *segmenters]
        kind = "is neither a classifier nor a segmenter" if name in models.list_models() else "is not in torchvision"
        raise ValueError(f"model torchvision:{name} {kind}; {close_matches(name, known)}")
    options = {"aux_logits": False, "init_weights": True} if name in WITH_AUXILIARY_HEADS else {}
    sizes: dict[str, Any] = {}
    if side and name.startswith("vit_"):
        sizes = {"image_size": side}
    elif side and name.startswith("maxvit"):
        sizes = {"input_size": (side, side)}
    build = functools.partial(models.get_model, name, weights=None, num_classes=classes, **options)
    return _sized(build, sizes)


def _sized(build: Callable[..., nn.Module], sizes: Mapping[str, Any]) -> nn.Module:
    """Return what ``build`` makes for tiles of these sizes; for those of its own where it takes no others."""
    if sizes:
        with contextlib.suppress(TypeError, AssertionError, ValueError):
            return build(**sizes)
    return build()


def create_timm(name: str, side: int | None, *, pretrained: bool = False, **options: Any) -> nn.Module:
    """Return a model of timm, for tiles of ``side`` px where it is made for one size and can be made for another."""
    import timm

    known = None if is_on_hub(name) else timm.get_pretrained_cfg(name)
    fixed = is_on_hub(name) or (known is not None and known.fixed_input_size)
    sized = known is not None and tuple(known.input_size[1:]) == (side, side)
    build = functools.partial(timm.create_model, name, pretrained=pretrained, **options)
    return _sized(build, {"img_size": side} if side and fixed and not sized else {})


def is_on_hub(name: str) -> bool:
    """Return whether timm takes the configuration of this model from the Hugging Face hub, or from a folder."""
    return name.startswith(("hf-hub:", "hf_hub:", "local-dir:"))


def check_timm(model: str, name: str) -> None:
    """Refuse a name that timm does not know.

    Raises:
        ValueError: there is no such model, or no such tag of it.
    """
    import timm

    if is_on_hub(name):
        return
    if not timm.is_model(name):
        raise ValueError(f"model {model}: {name} is not in timm; {close_matches(name, timm.list_models())}")
    base, _, tag = name.partition(".")
    tags = [known.partition(".")[2] for known in timm.list_pretrained(f"{base}.*")]
    if tag and tag not in tags:
        raise ValueError(f"model {model}: timm has no weights {tag!r} of {base}; known are {', '.join(tags) or 'none'}")


def build_timm(name: str, *, classes: int, side: int | None = None) -> nn.Module:
    """Return a model of timm by its name there, as ``build_model`` says.

    Raises:
        ValueError: timm has no such model, or the hub does not give its configuration.
    """
    check_timm(f"timm:{name}", name)
    try:
        return create_timm(name, side, num_classes=classes)
    except Exception as fault:
        if not is_on_hub(name):
            raise
        reason = (str(fault).strip().splitlines() or [""])[0][:200]
        raise ValueError(
            f"model timm:{name}: its configuration cannot be read: {type(fault).__name__}: {reason}. Without network, "
            "copy $HF_HOME of a machine that has it and set HF_HUB_OFFLINE=1; a gated model needs $HF_TOKEN"
        ) from fault


def build_smp(name: str, *, classes: int, pretrained: bool = False) -> nn.Module:
    """Return a segmentation network of segmentation-models-pytorch: ``DECODER(ENCODER)``, by their names there.

    Raises:
        ValueError: the package is not installed, has no such decoder or encoder, or does not join these two.
    """
    try:
        import segmentation_models_pytorch as smp
    except ImportError as fault:
        raise ValueError(
            f"model smp:{name} is of the package segmentation-models-pytorch, which cannot be imported: {fault}; "
            'install it: pip install "megatile[smp]"'
        ) from fault
    decoders = {kind.__name__: kind for kind in smp.MODEL_ARCHITECTURES_MAPPING.values()}
    form = re.fullmatch(r"([^()]*)(?:\(([^()]*)\))?", name)
    decoder, encoder = (group or "" for group in form.groups()) if form else (name, "")
    if decoder not in decoders:
        hint = close_matches(decoder, decoders)
        raise ValueError(f"model smp:{name}: segmentation-models-pytorch has no decoder {decoder!r}; {hint}")
    if not encoder:
        raise ValueError(
            f"model smp:{name} names no encoder: write one in parentheses, such as smp:{decoder}(resnet34)"
        )
    if encoder.startswith(FROM_TIMM):
        check_timm(f"smp:{name}: encoder {encoder}", encoder.removeprefix(FROM_TIMM))
    elif encoder not in (known := smp.encoders.get_encoder_names()):
        hint = f"{close_matches(encoder, known)} Encoders of timm are written {FROM_TIMM}NAME"
        raise ValueError(f"model smp:{name}: segmentation-models-pytorch has no encoder {encoder!r}; {hint}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of names that the package keeps beside newer ones
            weights = smp_weights(encoder) if pretrained else None
            built: nn.Module = decoders[decoder](encoder, encoder_weights=weights, classes=classes)
    except Exception as fault:  # each decoder says in its own way which encoders it cannot take
        if torch.get_default_device().type == "meta" and isinstance(fault, RuntimeError):
            raise  # an encoder that looks at numbers while it is built
        why = f"{type(fault).__name__}: {' '.join(str(fault).split())}"
        raise ValueError(
            f"model smp:{name}: {decoder} does not go with the encoder {encoder}: {why}; choose another, such as "
            f"smp:{decoder}({'tu-vit_tiny_patch16_224' if decoder == 'DPT' else 'resnet34'})"
        ) from fault
    return built


def smp_weights(encoder: str) -> str | bool:
    """Return the name of the pretrained weights of an encoder: those on ImageNet, where there are several."""
    from segmentation_models_pytorch.encoders import encoders

    if encoder.startswith(FROM_TIMM):
        return True
    known = list(encoders[encoder]["pretrained_settings"])
    return "imagenet" if "imagenet" in known else known[0]


def build_from_factory(path: str, *, classes: int) -> nn.Module:
    """Return what ``package.module:factory`` makes. Its signature: ``factory(*, classes: int) -> nn.Module``.

    The module takes float (n, 3, h, w) and returns logits (n, classes) or (n, classes, h, w). A class will do.

    Raises:
        ValueError: cannot be imported, is not there, is not callable, takes no ``classes``, or gives no ``nn.Module``.
    """
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as fault:  # the user's module may fail in any way while it is imported
        raise ValueError(
            f"model {path}: module {module_name!r} cannot be imported: {type(fault).__name__}: {fault}; "
            f"run from the folder that holds it, or install it"
        ) from fault
    try:
        factory: Callable[..., Any] = getattr(module, attribute)
    except AttributeError:
        known = [key for key, value in vars(module).items() if callable(value) and value.__module__ == module.__name__]
        hint = close_matches(attribute, known)
        raise ValueError(f"model {path}: {module.__file__} has no {attribute!r}; {hint}") from None
    if not callable(factory):
        raise ValueError(f"model {path}: {attribute} is no function or class but a {type(factory).__name__}")
    try:
        inspect.signature(factory).bind(classes=classes)
    except TypeError as fault:
        raise ValueError(
            f"model {path}: it is called as {attribute}(classes={classes}), but its signature is "
            f"{attribute}{inspect.signature(factory)}: {fault}"
        ) from fault
    built = factory(classes=classes)
    if not isinstance(built, nn.Module):
        raise ValueError(f"model {path}: the factory must return a torch.nn.Module; got a {type(built).__name__}")
    return built


def replace_norm(model: nn.Module, name: str, norm: Norm) -> None:
    """Put another norm in the place of every BatchNorm2d of ``model``; its scale and shift parameters stay.

    Raises:
        ValueError: there is no BatchNorm2d, or a variant of it (timm joins some with the activation) that would remain.
    """
    norms = [
        (parent, key, child)
        for parent in model.modules()
        for key, child in parent.named_children()
        if type(child) is nn.BatchNorm2d
    ]
    rest = {type(m).__name__ for m in model.modules() if isinstance(m, _BatchNorm)} - {nn.BatchNorm2d.__name__}
    if rest or not norms:
        why = f"it normalises with {', '.join(sorted(rest))}" if rest else "it has no BatchNorm2d to replace"
        raise ValueError(f"--norm {norm} cannot be had for model {name}: {why}; use --norm batch to keep it as it is")
    for parent, key, old in norms:
        new: nn.GroupNorm | ChannelNorm
        if norm == "group":
            new = nn.GroupNorm(group_count(old.num_features), old.num_features, eps=old.eps, affine=old.affine)
        else:
            new = ChannelNorm(old.num_features, eps=old.eps, elementwise_affine=old.affine)
        new.weight, new.bias = old.weight, old.bias
        setattr(parent, key, new)


def freeze_norms(model: nn.Module, name: str) -> None:
    """Let every BatchNorm of ``model`` keep its running statistics as they are; scale and shift are trained.

    Raises:
        ValueError: there is none that has running statistics.
    """
    norms = [part for part in model.modules() if isinstance(part, _BatchNorm) and part.track_running_stats]
    if not norms:
        raise ValueError(
            f"--norm frozen cannot be had for model {name}: it has no BatchNorm with running statistics; use --norm "
            "batch to keep it as it is"
        )
    keep_statistics(norms)


def keep_statistics(norms: Iterable[_BatchNorm]) -> None:
    """Let ``norms`` go by their running statistics as they are, in training too."""
    for norm in norms:
        if not isinstance(norm, FrozenBatchNorm2d):
            norm.__class__ = _frozen_kind(type(norm))  # type: ignore[arg-type]
        norm.train(False)


@functools.cache
def _frozen_kind(kind: Any) -> Any:
    """``kind`` that stays in evaluation mode."""
    if kind is nn.BatchNorm2d:
        return FrozenBatchNorm2d
    return type(f"Frozen{kind.__name__}", (kind,), {"train": stay_in_evaluation, "__module__": kind.__module__})


def close_matches(name: str, known: Iterable[str]) -> str:
    """Return the hint of an error: what ``name`` may have meant."""
    names = sorted(known)
    if matches := difflib.get_close_matches(name, names, n=4, cutoff=0.5):
        return f"did you mean {', '.join(matches)}?"
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return f"known are {', '.join(names[:SHOWN_NAMES])}{more}"
