"""Models that ``--grid`` computes under pipelines and spatial teams, on even and on odd tiles.

Takes nothing; gives entries as plain values. Families of which the zoo has a member are there by name; ``UNSEEN`` are
timm's families that the project had not tried before.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.model_zoo.zoo import Entry

WAYS = ("gpipe", "1f1b", "master", "spatial 2x1", "spatial 3x1")
EVEN, ODD = 96, 97
STEPS = 2
"""The second begins with momentum and running statistics of the first."""

KNOWN = (
    "resnet18", "resnet50", "torchvision:resnext50_32x4d", "torchvision:mobilenet_v3_small",
    "torchvision:efficientnet_b0", "torchvision:shufflenet_v2_x0_5", "torchvision:squeezenet1_1",
    "torchvision:densenet121", "benchmarks.exactness.models:googlenet", "torchvision:regnet_x_400mf",
    "torchvision:convnext_tiny", "torchvision:lraspp_mobilenet_v3_large", "timm:resnest14d",
)  # fmt: skip
SIDES = {
    "timm:hrnet_w18_small": 128,
    "timm:dla34": 128,
    "unet_w8": 112,
    "smp:Unet(resnet18)": 160,
    "smp:FPN(mobilenet_v2)": 160,
    "smp:Linknet(resnet18)": 160,
    "benchmarks.model_zoo.monai_nets:AttentionUnet": 100,
    "benchmarks.model_zoo.monai_nets:BasicUNet": ODD,
    "benchmarks.model_zoo.monai_nets:HighResNet": ODD,
}
"""Model -> second side in px: the smallest odd one that the plain model takes; if it takes none, another even one."""

UNSEEN = (
    "repghostnet_050", "selecsls42b", "starnet_s050", "semnasnet_050", "spnasnet_100", "hardcorenas_a", "shvit_s1",
    "swiftformer_xs", "efficientvit_b0", "fasternet_t0", "lcnetv2_small", "mambaout_femto", "darknet17",
    "cspnext_tiny", "legacy_seresnet18", "resnetaa34d", "regnetz_005", "repvit_m0_9", "mobilevitv2_050", "gernet_s",
)  # fmt: skip


def grid_entries() -> Iterator[Entry]:
    """Yield each model with both sides."""
    sides = dict.fromkeys(KNOWN, ODD) | SIDES | {f"timm:{name}": ODD for name in UNSEEN}
    for model, side in sides.items():
        for tile in (EVEN, side):
            yield Entry(model, "grid", tile, ways=WAYS, steps=STEPS)
