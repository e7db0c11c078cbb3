"""What a result was measured on, in one line: the date, the processor, the versions that matter."""

from __future__ import annotations

import platform
from datetime import date

import torch

from app.launch.host import cpu_model, usable_cores


def measured_on() -> str:
    """Date, processor, cores, Python and torch."""
    return (
        f"{date.today().isoformat()}, {cpu_model()}, {usable_cores()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}"
    )
