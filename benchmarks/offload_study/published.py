"""Published figures of the study: seconds for 20 epochs on a V100, batch 32, 398 pictures of ants and bees.

Takes nothing; gives figures by model, in the order of ``MODES``. Its copies did not overlap with computation, which it
left as future work.
"""

from __future__ import annotations

MODES = ("none", "naive", "pinned", "nonblocking", "pinned-nonblocking")

SECONDS = {
    "vgg19": (30.1, 150.5, 166.7, 154.0, 161.0),
    "alexnet": (24.1, 42.2, 47.4, 41.5, 47.6),
    "resnet50": (26.2, 113.6, 110.1, 113.6, 109.4),
    "inception_v3": (32.2, 124.3, 120.2, 123.1, 119.3),
}


def published_ratio(model: str, mode: str) -> float | None:
    """Seconds with ``mode`` over seconds without offload; None for what the study has not."""
    if model not in SECONDS or mode not in MODES:
        return None
    return SECONDS[model][MODES.index(mode)] / SECONDS[model][0]
