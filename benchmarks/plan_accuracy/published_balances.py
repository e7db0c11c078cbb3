"""torchgpipe's balances as cuts of our models: what its authors chose by hand for 2, 4 and 8 GPUs.

Takes the name of a model and a number of stages; gives the names that ``partition_at`` cuts before.
Read from kakaobrain/torchgpipe, commit a1b4ee2: ``benchmarks/{unet,resnet101,amoebanetd}-speed/main.py`` (balances) and
``benchmarks/models/{unet,resnet,amoebanet}/__init__.py`` (layers). A balance there counts the layers of each stage in
one flat ``nn.Sequential``. That list, layer by layer, and what it is in our graph:

U-Net(5,64), 241 layers, 3 x 192 x 192 px, one class, instance norm
    five encoder cells of 22: 5 x (convolution, dropout, norm, leaky ReLU), stash, down -> encoder.0 to .4, each with
    its down; the stash is no layer of ours. bottleneck of 20 -> bottleneck. five decoder cells of 22: up, join, 5 x
    (convolution, dropout, norm, leaky ReLU) -> up, cat, decoder.0 to .4. segment -> head.
ResNet-101, 370 layers, 3 x 224 x 224 px, 1000 classes
    conv1, bn1, relu, maxpool -> the same. 33 blocks of 11: identity, conv1, bn1, relu1, conv2, bn2, relu2, conv3, bn3,
    residual, relu3 -> layer1.0 to layer4.2; the identity is no layer of ours, the residual is our sum. avgpool, flat,
    fc -> the same.
AmoebaNet-D(18,256), 24 layers, 3 x 224 x 224 px, 1000 classes
    stem1 -> stem. stem2, stem3 and the 20 cells -> cells.0 to .21. classify -> pool, flatten, fc.
    Balances are those for 32 microbatches; those for 4 are the same, those for 1 differ.

Two differences. Our ReLUs work in place, so that no cut may fall before one; such a cut falls after it instead, which
is the nearest place and lets the same bytes through: the cut of ResNet-101 in 2 (before the last ReLU of layer3.4) and
the third in 4 (before the first ReLU of layer3.16). And the projection of a shortcut runs with the sum there, at the
start of the block here: the first cut of ResNet-101 in 4 leaves that of layer2.0 (132,096 parameters) to the first
stage instead of the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

BALANCES: dict[str, dict[int, tuple[int, ...]]] = {
    "unet(5,64)": {2: (104, 137), 4: (30, 66, 84, 61), 8: (16, 27, 31, 44, 22, 57, 27, 17)},
    "resnet101": {2: (135, 235), 4: (44, 92, 124, 110), 8: (26, 22, 33, 44, 44, 66, 66, 69)},
    "amoebanet(18,256)": {2: (9, 15), 4: (3, 6, 7, 8), 8: (2, 2, 2, 3, 3, 4, 4, 4)},
}
"""Model, as ``--model`` takes it -> stages -> layers of each stage, as published."""

RESNET101_BLOCKS = (3, 4, 23, 3)
UNET_DEPTH, UNET_CONVS = 5, 5


def published_cuts(model: str, stages: int) -> tuple[str, ...]:
    """Names of our layers and modules before which the stages after the first begin.

    Args:
        model: ``unet(5,64)``, ``resnet101`` or ``amoebanet(18,256)``.
        stages: 2, 4 or 8.

    Raises:
        ValueError: torchgpipe has published no balance for it.
    """
    balance = BALANCES.get(model, {}).get(stages)
    if balance is None:
        raise ValueError(
            f"torchgpipe's balances are for {', '.join(BALANCES)} in 2, 4 and 8 stages; got {model!r} in {stages}"
        )
    places = cut_places(model)
    assert len(places) == sum(balance)
    return tuple(places[start] for start in list(accumulate(balance))[:-1])


def cut_places(model: str) -> tuple[str, ...]:
    """For each layer of torchgpipe's ``model``, in order, the name in ours where a cut before it falls."""
    makers = {"unet(5,64)": _unet, "resnet101": _resnet101, "amoebanet(18,256)": _amoebanet}
    return _moved_on(makers[model]())


def _moved_on(places: Sequence[str | None]) -> tuple[str, ...]:
    """None, where no cut may fall, becomes the next place."""
    following: list[str] = []
    for place in reversed(places):
        following.append(following[-1] if place is None else place)
    return tuple(reversed(following))


def _unet() -> list[str | None]:
    encoder = [place for k in range(UNET_DEPTH) for place in (*_cell(f"encoder.{k}"), _nth("down", k), _nth("down", k))]
    decoder = [place for k in range(UNET_DEPTH) for place in (_nth("up", k), _nth("cat", k), *_cell(f"decoder.{k}"))]
    return [*encoder, *_cell("bottleneck"), *decoder, "head"]


def _cell(path: str) -> list[str | None]:
    """Convolution, dropout, norm, leaky ReLU in place, each four places on."""
    return [None if k % 4 == 3 else f"{path}.{k}" for k in range(4 * UNET_CONVS)]


def _nth(layer: str, k: int) -> str:
    """Name of the layer that calls ``layer`` for the k-th time, from 0."""
    return f"{layer}_{k}" if k else layer


def _resnet101() -> list[str | None]:
    places: list[str | None] = ["conv1", "bn1", None, "maxpool"]
    for stage, blocks in enumerate(RESNET101_BLOCKS, 1):
        for k in range(blocks):
            block = f"layer{stage}.{k}"
            places += [block, block, f"{block}.bn1", None, f"{block}.conv2", f"{block}.bn2", None]
            places += [f"{block}.conv3", f"{block}.bn3", f"layer{stage}_{k}_add", None]
    return [*places, "avgpool", "flatten", "fc"]


def _amoebanet() -> list[str | None]:
    return ["stem", *(f"cells.{k}" for k in range(22)), "pool"]
