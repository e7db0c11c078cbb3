"""What the documents tell their readers to type."""

from __future__ import annotations

import re
from pathlib import Path


def commands(path: Path) -> list[str]:
    """Lines of the ``bash`` blocks of a document, without their comments."""
    blocks = re.findall(r"```bash\n(.*?)```", path.read_text(), re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]
