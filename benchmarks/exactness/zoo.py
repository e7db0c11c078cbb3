"""Models of libraries, and odd ones of users: torchvision, timm, segmentation-models-pytorch, MONAI.

Takes nothing; gives entries as plain values. Of families that differ only in depth or width, the smallest member is an
entry; the rest of torchvision's classifiers up to 150 million parameters are marked ``deep``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from benchmarks.exactness.monai_nets import LARGE, NETWORKS, PLAIN_FLOAT, SIDES
from benchmarks.exactness.odd import flow, sharing, state, values

CLASSIFIERS = (
    "alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "googlenet", "inception_v3",
    "maxvit_t", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_large", "mobilenet_v3_small", "regnet_x_400mf",
    "regnet_y_400mf", "resnet18", "resnet50", "resnext50_32x4d", "shufflenet_v2_x0_5", "squeezenet1_0",
    "squeezenet1_1", "swin_t", "swin_v2_t", "vgg11", "vgg11_bn", "vit_b_32", "wide_resnet50_2",
)  # fmt: skip
SEGMENTERS = ("deeplabv3_mobilenet_v3_large", "deeplabv3_resnet50", "fcn_resnet50", "lraspp_mobilenet_v3_large")
GIANTS = ("convnext_large", "vit_l_32", "vit_l_16", "vit_h_14", "regnet_y_128gf")
"""Of torchvision, above 150 million parameters: wider and deeper members of families that are in the table."""

ENCODERS = (
    "resnet18", "resnet50", "resnext50_32x4d", "seresnet50", "densenet121", "efficientnet_b0", "mobilenetv3_large_100",
    "regnety_004", "vgg16_bn", "inception_v3", "convnext_tiny", "pvt_v2_b0", "mobilevit_s",
    "swin_tiny_patch4_window7_224",
)  # fmt: skip
"""Of the U-Nets over timm, each of another family."""

SMP_DECODERS = (
    "Unet", "UnetPlusPlus", "MAnet", "Linknet", "FPN", "PSPNet", "DeepLabV3", "DeepLabV3Plus", "PAN", "UPerNet",
    "Segformer",
)  # fmt: skip
SMP_ENCODERS = ("resnet18", "efficientnet-b0", "mobilenet_v2", "tu-regnety_002", "vgg11_bn", "densenet121", "mit_b0")
SMP_DILATED = ("DeepLabV3", "DeepLabV3Plus", "PAN")
"""Decoders that take encoders which can do without their last strides."""

UNDILATED = ("vgg11_bn", "densenet121", "mit_b0")
"""Encoders that cannot."""

SMP_REFUSES = ("UnetPlusPlus(mit_b0)", "Linknet(mit_b0)")

TIMM = (
    # Residual networks and what became of them: the most used family of timm by far.
    "resnet18", "resnet50", "resnet18d", "resnetv2_18", "resnext26ts", "seresnext26d_32x4d", "skresnet18",
    "ecaresnet26t", "resnest14d", "res2net50_26w_4s", "gcresnext26ts", "wide_resnet50_2", "resnetblur50",
    # Searched and mobile ones, which come first where a tile must be cheap.
    "efficientnet_b0", "tf_efficientnet_b0", "efficientnet_lite0", "tf_efficientnetv2_b0", "efficientnetv2_rw_t",
    "mobilenetv2_050", "mobilenetv3_small_050", "mobilenetv4_conv_small", "mobilenetv4_hybrid_medium", "mnasnet_small",
    "fbnetc_100", "ghostnet_100", "lcnet_050", "tinynet_e", "mixnet_s", "regnetx_002", "regnety_002", "rexnet_100",
    # Reparametrised and recent convolutions.
    "repvgg_a0", "mobileone_s0", "convnext_atto", "convnextv2_atto", "inception_next_atto", "edgenext_xx_small",
    "hgnetv2_b0", "fastvit_t8",
    # Older ones that published work keeps using, and encoders of segmentation.
    "densenet121", "vgg11", "vgg11_bn", "inception_v3", "xception41", "dpn48b", "dla34", "hrnet_w18_small",
    "cspdarknet53", "ese_vovnet19b_dw", "nf_resnet50",
)  # fmt: skip
"""50 CNNs: those of timm that its documentation, published pathology work and segmentation encoders name most, each
family by its smallest member, and several of a family where they differ in more than size (stem, attention, padding,
activation inside the norm)."""

STOCHASTIC_DEPTH = ("torchvision:convnext", "torchvision:efficientnet", "torchvision:maxvit", "torchvision:swin")
"""They leave out blocks tile by tile: with few tiles a block may be left out for all, and its gradients be zero."""


@dataclass(frozen=True)
class Entry:
    """A model of the table.

    Attributes:
        model: as for ``--model``.
        library: whose it is, a heading of the table.
        tile: px; the smallest that the model takes and that leaves batch norm several values a channel.
        tiles: of a microbatch.
        deep: of the table of larger models.
    """

    model: str
    library: str
    tile: int = 64
    tiles: int = 2
    dtype: Literal["float64", "float32"] = "float64"
    deep: bool = False

    @property
    def name(self) -> str:
        """Return the model without the folders of a factory, with the side of the tiles where there are two."""
        name = self.model.replace("benchmarks.exactness.", "")
        return f"{name} at {self.tile} px" if self.library == FAMILIES else name


def all_entries() -> Iterator[Entry]:
    """Yield every model of the zoo."""
    from torchvision import models

    for room in (sharing, state, flow, values):
        yield from (Entry(f"{room.__name__}:{name}", "odd", 32) for name in room.MODELS)
    for name, side in ((name, SIDES.get(name, 32)) for name in NETWORKS):
        dtype: Literal["float64", "float32"] = "float32" if name in PLAIN_FLOAT else "float64"
        yield Entry(f"benchmarks.exactness.monai_nets:{name}", "MONAI", side, 1 if name in LARGE else 2, dtype)
    for decoder in SMP_DECODERS:
        for encoder in SMP_ENCODERS:
            name = f"{decoder}({encoder})"
            if name not in SMP_REFUSES and not (decoder in SMP_DILATED and encoder in UNDILATED):
                yield Entry(f"smp:{name}", "smp", 128 if decoder == "PAN" else 64)
    yield Entry("smp:DPT(tu-vit_tiny_patch16_224)", "smp", 224, 1)
    yield from (Entry(f"timm:{name}", "timm", 96 if name == "inception_v3" else 64) for name in TIMM)
    yield from map(_unet, ENCODERS)
    names = set(models.list_models(module=models)) - set(GIANTS)
    yield from (_torchvision(name) for name in (*CLASSIFIERS, *SEGMENTERS))
    yield Entry("benchmarks.exactness.models:googlenet", "torchvision")
    yield Entry("benchmarks.exactness.models:fcn_resnet50", "torchvision")
    yield from (_torchvision(name, deep=True) for name in sorted(names - set(CLASSIFIERS)))
    # The least that it takes with its head, which ends in a norm over 1 x 1 px.
    yield Entry("benchmarks.exactness.models:inception_v3", "torchvision", 299, 4, deep=True)


def _unet(encoder: str) -> Entry:
    if encoder.startswith("swin"):
        return Entry(f"unet:{encoder}", "unet over timm", 224, 1)
    return Entry(f"unet:{encoder}", "unet over timm", 96 if encoder == "inception_v3" else 64)


def _torchvision(name: str, *, deep: bool = False) -> Entry:
    model = f"torchvision:{name}"
    side = 224 if name.startswith(("vit", "maxvit")) else 75 if name == "inception_v3" else 64
    tiles = 4 if model.startswith(STOCHASTIC_DEPTH) and side < 224 else 1 if side == 224 else 2
    # A gigabyte a copy in float64.
    return Entry(model, "torchvision", side, tiles, "float32" if name.startswith("vgg") else "float64", deep)


FAMILIES = "families"
EVEN, ODD = 96, 97
KNOWN = (
    "resnet18", "resnet50", "torchvision:resnext50_32x4d", "torchvision:mobilenet_v3_small",
    "torchvision:efficientnet_b0", "torchvision:shufflenet_v2_x0_5", "torchvision:squeezenet1_1",
    "torchvision:densenet121", "benchmarks.exactness.models:googlenet", "torchvision:regnet_x_400mf",
    "torchvision:convnext_tiny", "torchvision:lraspp_mobilenet_v3_large", "timm:resnest14d",
)  # fmt: skip
SECOND_SIDES = {
    "timm:hrnet_w18_small": 128,
    "timm:dla34": 128,
    "unet_w8": 112,
    "smp:Unet(resnet18)": 160,
    "smp:FPN(mobilenet_v2)": 160,
    "smp:Linknet(resnet18)": 160,
    "benchmarks.exactness.monai_nets:AttentionUnet": 100,
    "benchmarks.exactness.monai_nets:BasicUNet": ODD,
    "benchmarks.exactness.monai_nets:HighResNet": ODD,
}
"""Model -> second side in px: the smallest odd one that the plain model takes; if it takes none, another even one."""
UNSEEN = (
    "repghostnet_050", "selecsls42b", "starnet_s050", "semnasnet_050", "spnasnet_100", "hardcorenas_a", "shvit_s1",
    "swiftformer_xs", "efficientvit_b0", "fasternet_t0", "lcnetv2_small", "mambaout_femto", "darknet17",
    "cspnext_tiny", "legacy_seresnet18", "resnetaa34d", "regnetz_005", "repvit_m0_9", "mobilevitv2_050", "gernet_s",
)  # fmt: skip
"""Families of timm that are not in the zoo."""


def family_entries() -> Iterator[Entry]:
    """Yield each model on an even and on an odd side."""
    sides = dict.fromkeys(KNOWN, ODD) | SECOND_SIDES | {f"timm:{name}": ODD for name in UNSEEN}
    for model, side in sides.items():
        for tile in (EVEN, side):
            yield Entry(model, FAMILIES, tile)
