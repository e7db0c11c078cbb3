"""The settings of a command as fields of dataclasses: which are flags, which are for developers, and both as YAML.

Takes a frozen dataclass, nested ones flattened. A field whose type is marked ``Suppress`` is no flag but a developer
setting: a key of the ``developer:`` block of a YAML file, or ``--developer KEY=VALUE``.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import tyro

BLOCK = "developer"
"""Key of the YAML file's block of developer settings, and flag that takes one of them."""
HIDDEN = get_args(tyro.conf.Suppress[int])[1]
"""What marks the type of a developer setting: tyro makes no flag of it."""


def flags_of(config_type: type) -> Iterator[tuple[str, Any]]:
    """Give (name, type) of every setting that is a flag."""
    return ((name, hint) for name, hint, is_flag in _settings(config_type) if is_flag)


def _settings(config_type: type) -> Iterator[tuple[str, Any, bool]]:
    """(name, type, whether it is a flag) of every setting, nested dataclasses flattened, positional arguments left
    out."""
    hints = get_type_hints(config_type, include_extras=True)
    for field in dataclasses.fields(config_type):
        hint = hints[field.name]
        if get_origin(hint) is Annotated:
            if HIDDEN in get_args(hint):
                yield field.name, get_args(hint)[0], False
        elif dataclasses.is_dataclass(hint):
            yield from _settings(hint)  # type: ignore[arg-type]  # a class, never an instance, stands in a type hint
        else:
            yield field.name, hint, True


def developer_settings(config_type: type) -> dict[str, Any]:
    """Return the type of each developer setting of a command, by name."""
    return {name: hint for name, hint, is_flag in _settings(config_type) if not is_flag}


def in_blocks(config: Any) -> dict[str, Any]:
    """Return all settings as a YAML file has them: those that are flags, then the ``developer:`` block."""
    values, hidden = flat(config), developer_settings(type(config))
    block = {name: values.pop(name) for name in hidden}
    return values | ({BLOCK: block} if block else {})


def out_of_blocks(loaded: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``in_blocks`` gave, or a file from before there were blocks, under the settings' names."""
    values = dict(loaded)
    block = values.pop(BLOCK, {})
    return values | (block if isinstance(block, dict) else {BLOCK: block})


def arguments_for(config_type: type, values: Mapping[str, Any]) -> list[str]:
    """Return the words of a command line that say ``values``, settings by name; None says nothing."""
    hidden = developer_settings(config_type)
    words: list[str] = []
    for name, value in values.items():
        key = name.replace("_", "-")
        if value is not None:
            texts = [str(each) for each in value] if isinstance(value, list) else [str(value)]
            words += [f"--{BLOCK}", f"{key}={value}"] if name in hidden else [f"--{key}", *texts]
    return words


def flat(config: Any) -> dict[str, Any]:
    """All settings under their flags' names, nested dataclasses flattened, as YAML can hold them."""
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


def developer_values(hidden: Mapping[str, Any], values: Mapping[Any, Any], where: str) -> dict[str, str]:
    """Return ``values`` as text, by the settings' names.

    Args:
        hidden: the developer settings of the command.
        where: they were given.

    Raises:
        ValueError: there is no such setting.
    """
    texts: dict[str, str] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in hidden:
            near = difflib.get_close_matches(name, hidden, 1)
            raise ValueError(
                f"{where}: unknown developer setting `{key}`"
                + (f"; did you mean `{near[0]}`?" if near else "")
                + f"\n       known: {', '.join(sorted(hidden)) or 'none'}"
            )
        texts[name] = str(value).capitalize() if hidden[name] is bool else str(value)
    return texts


def key_and_value(text: str) -> tuple[str, str]:
    """Return both halves of ``KEY=VALUE``.

    Raises:
        ValueError: it has no ``=``.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--{BLOCK} takes KEY=VALUE, such as --{BLOCK} timeout-s=600; got {text!r}")
    return key, value


def refuse_as_flags(argv: Sequence[str], hidden: Mapping[str, Any]) -> None:
    """Let no developer setting be written as a flag.

    Raises:
        ValueError: one is; says how to give it.
    """
    for word in argv:
        key = word.partition("=")[0].removeprefix("--").removeprefix("no-").replace("_", "-")
        if word.startswith("--") and key.replace("-", "_") in hidden:
            raise ValueError(
                f"{word} is a developer setting: write `{key.replace('-', '_')}` under `{BLOCK}:` in a --config file, "
                f"or give --{BLOCK} {key}=VALUE"
            )
