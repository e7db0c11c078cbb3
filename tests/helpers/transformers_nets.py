"""Small models of transformers, built from configurations without a download; factories for ``--model``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Logits(nn.Module):
    """A transformers model that gives its logits alone."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.network(images).logits
        return logits


def segformer(classes: int) -> nn.Module:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(
        num_labels=classes,
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 8, 16, 16],
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
    )
    return Logits(SegformerForSemanticSegmentation(config))


def vit(classes: int) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_labels=classes,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=64,
        patch_size=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return Logits(ViTForImageClassification(config))


def swin(classes: int) -> nn.Module:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        num_labels=classes,
        image_size=64,
        embed_dim=8,
        depths=[1, 1],
        num_heads=[1, 2],
        window_size=4,
        drop_path_rate=0.0,
    )
    return Logits(SwinForImageClassification(config))


def convnext(classes: int) -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(num_labels=classes, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1])
    return Logits(ConvNextForImageClassification(config))
