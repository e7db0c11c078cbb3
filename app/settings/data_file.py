"""YAML and JSON files of names and values, read as data, or refused in one message with the name of the file.

Takes a path. Nothing in a file runs code (``yaml.safe_load``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from pipelines.slides.whole_files import write_text


def read_data(path: Path) -> dict[str, Any]:
    """Return the names and values in a file, JSON by its suffix, else YAML; of an empty YAML file, none.

    Raises:
        ValueError: the file cannot be read or understood, or holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
        loaded = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except RecursionError as fault:
        raise ValueError(f"{path} cannot be read: it is nested too deeply; expected names and values") from fault
    except OSError as fault:
        raise ValueError(f"{path} cannot be read: {fault.strerror}") from fault
    except (ValueError, yaml.YAMLError) as fault:  # ValueError: no UTF-8, no JSON, or a date that is none
        raise ValueError(f"{path} cannot be read: {fault}") from fault
    if loaded is None and path.suffix != ".json":
        return {}
    if not isinstance(loaded, dict):
        raise ValueError(f"{path}: expected `key: value` lines, found a {type(loaded).__name__}")
    return loaded


def write_json(path: Path, value: Any, *, nan: bool = False) -> Path:
    """Write ``value`` as ``write_text`` does; ``nan``: numbers in it may be NaN, which is not JSON.

    Raises:
        ValueError: one is.
    """
    return write_text(path, json.dumps(value, indent=2, allow_nan=nan) + "\n")
