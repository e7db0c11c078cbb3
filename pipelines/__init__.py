"""Slides as files, and batches of their tiles. No model and no communication library is imported here.

``Rare[T]`` marks a setting that hardly anybody changes: ``--help-all`` shows its flag, ``--help`` does not.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

T = TypeVar("T")

RARE = "rare"
Rare = Annotated[T, RARE]
