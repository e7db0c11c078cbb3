"""The settings of a command as fields of dataclasses, as flags and as YAML.

Takes a frozen dataclass, nested ones flattened: every field is one flag and one YAML key, ``Rare`` ones included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import tyro

from pipelines.slides.rare import RARE

UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def bytes_of(text: str) -> int | None:
    """Bytes of a size such as ``512MiB`` or ``1.5GiB``; None when it is not one.

    >>> bytes_of("1.5MiB"), bytes_of("lots")
    (1572864, None)
    """
    for unit, factor in UNITS.items():
        number = text.removesuffix(unit)
        if number != text:
            try:
                size = float(number) * factor
            except ValueError:
                return None
            return int(size) if size >= 1 else None
    return None


HIDDEN: Any = tyro.conf.Suppress
"""Marker of a field that tyro leaves out of its help."""
OLD_BLOCK = "developer"
"""Key under which ``config.yaml`` of older runs has their rare settings."""


class Flag(NamedTuple):
    """A setting that is a flag; ``rare``: only ``--help-all`` shows it."""

    name: str
    type: Any
    rare: bool


def flags_of(config_type: type) -> Iterator[Flag]:
    """Yield the flags of a command, nested dataclasses flattened, positional arguments left out."""
    hints = get_type_hints(config_type, include_extras=True)
    for field in dataclasses.fields(config_type):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from flags_of(hint)  # type: ignore[arg-type]  # a class, never an instance, stands in a type hint
        elif get_origin(hint) is not Annotated:
            yield Flag(field.name, hint, False)
        elif RARE in get_args(hint):
            yield Flag(field.name, get_args(hint)[0], True)


def without_rare(config_type: type) -> type:
    """Return a dataclass of which tyro's help shows the same flags but for rare ones."""
    namespace: dict[str, Any] = {"__doc__": config_type.__doc__, "__module__": config_type.__module__}
    namespace |= {"__qualname__": config_type.__qualname__, "__annotations__": {}}
    hints = get_type_hints(config_type, include_extras=True)
    for field in dataclasses.fields(config_type):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            hint = without_rare(hint)  # type: ignore[arg-type]
            if field.default_factory is not dataclasses.MISSING:
                namespace[field.name] = dataclasses.field(default_factory=hint)
        elif RARE in get_args(hint):
            hint = HIDDEN[hint]
        namespace["__annotations__"][field.name] = hint
    return dataclasses.dataclass(frozen=True)(type(config_type.__name__, (config_type,), namespace))


def settings_of(loaded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in a run's ``config.yaml``, those of older runs without their block."""
    values = dict(loaded)
    if isinstance(values.get(OLD_BLOCK), dict):
        values |= values.pop(OLD_BLOCK)
    return values


def arguments_for(values: Mapping[str, Any]) -> list[str]:
    """Return the words of a command line that say ``values``, settings by name; None says nothing."""
    words: list[str] = []
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, list):
            words += [flag, *map(str, value)]
        elif value is not None:
            words += [flag, str(value)]
    return words


def flat(config: Any) -> dict[str, Any]:
    """Return all settings under their flags' names, nested dataclasses flattened, as YAML can hold them."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            values.update(flat(value))
        else:
            values[field.name] = _plain(value)
    return values


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def with_values(config: Any, values: Mapping[str, Any]) -> Any:
    """Return ``config`` with ``values`` by name, wherever they lie in it."""
    changed = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            changed[field.name] = with_values(value, values)
        elif field.name in values:
            changed[field.name] = values[field.name]
    return dataclasses.replace(config, **changed)
