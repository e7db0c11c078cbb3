"""Settings of a command as fields of dataclasses, as flags and as YAML; files of names and values.

Takes a frozen dataclass, nested ones flattened: every field is one flag and one YAML key, ``Rare`` ones included.
Nothing in a file runs code (``yaml.safe_load``); files are written as a whole or not at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import tyro
import yaml
from docstring_parser import parse_from_object

from pipelines import RARE
from pipelines.slides.whole_files import write_text

UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
HIDDEN: Any = tyro.conf.Suppress
"""Marker of a field that tyro leaves out of its help."""


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


def bytes_of(text: str) -> int | None:
    """Bytes of a size such as ``512MiB`` or ``1.5GiB``; None when it is not one.

    >>> bytes_of("1.5MiB"), bytes_of("lots")
    (1572864, None)
    """
    with contextlib.suppress(KeyError, ValueError):
        size = float(text[:-3]) * UNITS[text[-3:]]
        return int(size) if 1 <= size < math.inf else None
    return None


def broken(rules: Mapping[str, object]) -> list[str]:
    """Return the messages of the rules that are broken.

    Args:
        rules: by message, true where broken.
    """
    return [message for message, is_broken in rules.items() if is_broken]


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def at_least(settings: Any, **least: int) -> dict[str, object]:
    """Return rules for ``broken``: the settings of these names are None, or at least so large."""
    values = {name: getattr(settings, name) for name in least}
    return {
        f"{flag_of(name)} must be at least {least[name]}; got {value}": value is not None and value < least[name]
        for name, value in values.items()
    }


def sizes(settings: Any, **usual: str) -> dict[str, object]:
    """Return rules for ``broken``: the settings of these names are None, or sizes as the usual one that is given."""
    texts = {name: getattr(settings, name) for name in usual}
    return {
        f"{flag_of(name)} takes a size such as 512MiB or {usual[name]}; got {text!r}": text is not None
        and bytes_of(text) is None
        for name, text in texts.items()
    }


def differing(kept: Mapping[str, Any], asked: Mapping[str, Any], has: str, free: Collection[str] = ()) -> list[str]:
    """Return a line for each setting that is ``kept`` with another value than ``asked``, but those that are ``free``.

    Args:
        has: what keeps them, and its verb, as "the run has".
    """
    changed = {name: value for name, value in asked.items() if name not in free and kept.get(name) != value}
    return [f"{name}: {has} {kept.get(name)!r}, asked is {value!r}" for name, value in changed.items()]


def error_of(check: Callable[[], object]) -> list[str]:
    """Return the message of the ValueError that ``check`` raises, if it raises one."""
    try:
        check()
    except ValueError as error:
        return [str(error)]
    return []


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


def for_help(config_type: type, *, rare: bool) -> type:
    """Return the dataclass as tyro's help shows it: a paragraph for each flag, with or without ``rare`` ones."""
    namespace: dict[str, Any] = {"__doc__": config_type.__doc__, "__module__": config_type.__module__}
    namespace |= {"__qualname__": config_type.__qualname__, "__annotations__": {}}
    hints = get_type_hints(config_type, include_extras=True)
    helps = {param.arg_name: param.description or "" for param in parse_from_object(config_type).params}
    for field in dataclasses.fields(config_type):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            hint = for_help(hint, rare=rare)  # type: ignore[arg-type]
            if field.default_factory is not dataclasses.MISSING:
                namespace[field.name] = dataclasses.field(default_factory=hint)
        elif RARE in get_args(hint) and not rare:
            hint = HIDDEN[hint]
        elif field.name in helps:  # of which tyro would keep every line break
            hint = Annotated[hint, tyro.conf.arg(help=" ".join(helps[field.name].split()))]
        namespace["__annotations__"][field.name] = hint
    return dataclasses.dataclass(frozen=True)(type(config_type.__name__, (config_type,), namespace))


def arguments_for(values: Mapping[str, Any]) -> list[str]:
    """Return the words of a command line for ``values``, settings by name; None is left out."""
    words: list[str] = []
    for name, value in values.items():
        flag = flag_of(name)
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
    """Return ``config`` with ``values`` by name, nested ones included."""
    changed = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            changed[field.name] = with_values(value, values)
        elif field.name in values:
            changed[field.name] = values[field.name]
    return dataclasses.replace(config, **changed)
