"""MONAI's networks that take one 2-D image, in the smallest form that keeps what is special about each.

``module:NAME`` of each is a factory as ``--model package.module:factory`` asks for: it takes the number of classes and
gives a module for images (n, 3, h, w). Left out: networks for volumes only, and those that take text, noise levels,
labels or several images besides the one (diffusion, ControlNet, Transchex, MIL, registration of image pairs, SPADE).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

LEVELS: dict[str, Any] = {"channels": (4, 8, 16), "strides": (2, 2)}
KERNELS: dict[str, Any] = {"kernel_size": (3, 3, 3), "strides": (1, 2, 2), "upsample_kernel_size": (2, 2)}
DENSE: dict[str, Any] = {"init_features": 8, "growth_rate": 4, "block_config": (2, 2)}
WIDTHS: dict[str, Any] = {"features": (4, 4, 8, 8, 8, 4)}
FLEXIBLE: dict[str, Any] = {"pretrained": False, "decoder_channels": (16, 8, 8, 4, 4)}
ONCE = (1, 1, 1, 1)
NEXT: dict[str, Any] = {"blocks_down": ONCE, "blocks_bottleneck": 1, "blocks_up": ONCE}
SEGMENT: dict[str, Any] = {"blocks_down": (1, 1, 1), "blocks_up": (1, 1)}
SWIN: dict[str, Any] = {"feature_size": 12, "spatial_dims": 2, "depths": ONCE, "num_heads": (1, 2, 2, 2)}
MASKED: dict[str, Any] = {"hidden_size": 16, "mlp_dim": 16, "num_layers": 2, "num_heads": 2, "spatial_dims": 2}
MASKED |= {f"decoder_{name}": size for name, size in (("hidden_size", 16), ("mlp_dim", 16), ("num_layers", 1))}
QUANTIZED: dict[str, Any] = {"num_res_layers": 1, "num_res_channels": (8, 8), "num_embeddings": 8, "embedding_dim": 4}
QUANTIZED |= {"downsample_parameters": ((2, 4, 1, 1),) * 2, "upsample_parameters": ((2, 4, 1, 1, 0),) * 2}
NETWORKS: dict[str, Callable[[Any, int], nn.Module]] = {
    "AHNet": lambda n, k: n.AHNet(spatial_dims=2, in_channels=3, out_channels=k, upsample_mode="bilinear"),
    "AHNetTransposed": lambda n, k: n.AHNet(spatial_dims=2, in_channels=3, out_channels=k),
    "AttentionUnet": lambda n, k: n.AttentionUnet(2, 3, k, **LEVELS),
    "AutoEncoder": lambda n, k: n.AutoEncoder(2, 3, k, (4, 8), (2, 2), num_res_units=1, inter_channels=(8, 8)),
    "AutoencoderKL": lambda n, k: n.AutoencoderKL(2, 3, k, (1, 1), (8, 8), (False, True), norm_num_groups=4),
    "BasicUNet": lambda n, k: n.BasicUNet(2, 3, k, **WIDTHS),
    "BasicUNetBatchNorm": lambda n, k: n.BasicUNet(2, 3, k, **WIDTHS, norm="batch", upsample="nontrainable"),
    "BasicUNetPlusPlus": lambda n, k: n.BasicUNetPlusPlus(2, 3, k, **WIDTHS),
    "BasicUNetPlusPlusDeep": lambda n, k: n.BasicUNetPlusPlus(2, 3, k, **WIDTHS, deep_supervision=True),
    "Classifier": lambda n, k: n.Classifier((3, 32, 32), k, channels=(4, 8), strides=(2, 2)),
    "Critic": lambda n, k: n.Critic((3, 32, 32), channels=(4, 8), strides=(2, 2)),
    "Discriminator": lambda n, k: n.Discriminator((3, 32, 32), channels=(4, 8), strides=(2, 2)),
    "DenseNet": lambda n, k: n.DenseNet(2, 3, k, **DENSE),
    "DenseNetDropout": lambda n, k: n.DenseNet(2, 3, k, **DENSE, dropout_prob=0.2),
    "DynUNet": lambda n, k: n.DynUNet(2, 3, k, **KERNELS, filters=(4, 8, 8)),
    "DynUNetDeep": lambda n, k: n.DynUNet(
        2, 3, k, (3,) * 4, (1, 2, 2, 2), (2,) * 3, filters=(4, 4, 8, 8), deep_supervision=True, deep_supr_num=2
    ),
    "DynUNetResidual": lambda n, k: n.DynUNet(2, 3, k, **KERNELS, filters=(4, 8, 8), res_block=True, norm_name="batch"),
    "EfficientNetBN": lambda n, k: n.EfficientNetBN("efficientnet-b0", pretrained=False, spatial_dims=2, num_classes=k),
    "FlexibleUNet": lambda n, k: n.FlexibleUNet(3, k, "efficientnet-b0", **FLEXIBLE),
    "FlexibleUNetResNet": lambda n, k: n.FlexibleUNet(3, k, "resnet18", **FLEXIBLE),
    "FullyConnectedNet": lambda n, k: nn.Sequential(nn.Flatten(), n.FullyConnectedNet(3 * 32 * 32, k, (8, 8), 0.1)),
    "HighResNet": lambda n, k: n.HighResNet(2, 3, k),
    "HoVerNet": lambda n, k: n.HoVerNet(mode="fast", in_channels=3, out_classes=k),
    "MedNeXtS": lambda n, k: n.MedNeXt(2, 4, 3, k, **NEXT),
    "MedNeXtDeep": lambda n, k: n.MedNeXt(2, 4, 3, k, **NEXT, deep_supervision=True),
    "MaskedAutoEncoderViT": lambda n, k: n.MaskedAutoEncoderViT(3, 32, 8, **MASKED, decoder_num_heads=2),
    "PatchDiscriminator": lambda n, k: n.PatchDiscriminator(2, 4, 3, num_layers_d=2),
    "MultiScalePatchDiscriminator": lambda n, k: n.MultiScalePatchDiscriminator(2, 2, 2, 4, 3, minimum_size_im=32),
    "Quicknat": lambda n, k: n.Quicknat(num_classes=k, num_channels=3, num_filters=8),
    "RegUNet": lambda n, k: n.RegUNet(2, 3, 4, 2, out_channels=k),
    "Regressor": lambda n, k: n.Regressor((3, 32, 32), k, channels=(4, 8), strides=(2, 2)),
    "ResNet18": lambda n, k: n.resnet18(pretrained=False, spatial_dims=2, n_input_channels=3, num_classes=k),
    "ResNetBottleneck": lambda n, k: n.ResNet("bottleneck", [1, 1, 1, 1], [8, 8, 16, 16], 2, 3, num_classes=k),
    "SEResNet": lambda n, k: n.SENet(
        2, 3, "se_resnet_bottleneck", ONCE, 1, 16, inplanes=64, downsample_kernel_size=1, num_classes=k
    ),
    "SENetDropout": lambda n, k: n.SENet(2, 3, "se_resnetxt_bottleneck", ONCE, 32, 16, 0.2, num_classes=k),
    "SegResNet": lambda n, k: n.SegResNet(2, 8, 3, k, **SEGMENT),
    "SegResNetDropout": lambda n, k: n.SegResNet(2, 8, 3, k, 0.2, **SEGMENT, upsample_mode="deconv"),
    "SegResNetDS": lambda n, k: n.SegResNetDS(2, 8, 3, k, blocks_down=(1, 1, 1)),
    "SegResNetDSDeep": lambda n, k: n.SegResNetDS(2, 8, 3, k, blocks_down=ONCE, dsdepth=3),
    "SegResNetDS2": lambda n, k: n.SegResNetDS2(2, 8, 3, k, blocks_down=(1, 1, 1)),
    "SegResNetVAE": lambda n, k: n.SegResNetVAE(
        (32, 32), vae_nz=8, spatial_dims=2, init_filters=8, in_channels=3, out_channels=k, **SEGMENT
    ),
    "SwinUNETR": lambda n, k: n.SwinUNETR(3, k, **SWIN),
    "SwinUNETRv2": lambda n, k: n.SwinUNETR(3, k, **SWIN, use_v2=True, use_checkpoint=True),
    "TorchVisionFCModel": lambda n, k: n.TorchVisionFCModel(
        "resnet18", num_classes=k, pool=("avg", {"kernel_size": 1}), pretrained=False
    ),
    "UNETR": lambda n, k: n.UNETR(3, k, 32, 4, 24, 32, 2, spatial_dims=2),
    "UNet": lambda n, k: n.UNet(2, 3, k, **LEVELS, num_res_units=2),
    "UNetBatchNorm": lambda n, k: n.UNet(2, 3, k, **LEVELS, norm="batch", dropout=0.1),
    "VNet": lambda n, k: nn.Sequential(nn.Conv2d(3, 4, 1), n.VNet(2, 4, k)),
    "VQVAE": lambda n, k: n.VQVAE(2, 3, k, channels=(8, 8), **QUANTIZED),
    "VarAutoEncoder": lambda n, k: n.VarAutoEncoder(2, (3, 32, 32), k, 4, (4, 8), (2, 2)),
    "ViT": lambda n, k: n.ViT(3, 32, 8, 16, 32, 2, 2, classification=True, num_classes=k, spatial_dims=2),
    "ViTAutoEnc": lambda n, k: n.ViTAutoEnc(
        3, 32, 4, k, hidden_size=16, mlp_dim=32, num_layers=4, num_heads=2, spatial_dims=2
    ),
}
"""Name -> (module ``monai.networks.nets``, classes) -> network."""

SIDES = dict.fromkeys(("EfficientNetBN", "FlexibleUNet", "SwinUNETR", "SwinUNETRv2"), 64)
SIDES |= {"AHNet": 128, "AHNetTransposed": 128, "HoVerNet": 256}
"""Px of a tile, where 32 will not do."""

PLAIN_FLOAT = ("VQVAE", "HoVerNet")
"""One computes with a float32 of its own, and not in float64; the other is large."""

LARGE = ("HoVerNet",)
"""They take one tile a microbatch."""


def __getattr__(name: str) -> Callable[..., nn.Module]:
    """The factory called ``name``: of a module with one function a network there would be nothing else to read."""
    if name not in NETWORKS:
        raise AttributeError(name)
    return partial(build, name)


def build(name: str, classes: int) -> nn.Module:
    """The network called ``name``, with random weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of MONAI's own imports
        from monai.networks import nets
    return NETWORKS[name](nets, classes)
