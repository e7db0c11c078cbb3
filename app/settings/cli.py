"""The command-line frame that every ``python -m app.*`` shares.

Takes a frozen dataclass (nested ones are flattened: every field is one flag and one YAML key) and a body; returns the
exit code: 0 done, 1 failed, 2 wrong usage. ``--help`` leaves ``Rare`` fields out, ``--help-all`` shows all.
``--config FILE.yaml`` is read before the other flags, so flags win; ``--print-config`` writes the resolved settings as
YAML and stops. The faults that a settings class's ``validate()`` returns are printed all at once before anything runs.
"""

from __future__ import annotations

import difflib
import errno
import shutil
import sys
import textwrap
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import tyro
import yaml

from app.settings.console import ignore_broken_pipe
from app.settings.data_file import read_data
from app.settings.fields import arguments_for, flags_of, flat, settings_of, without_rare
from parallel.profile.cache import own_torch_cache
from pipelines.slides.slide import SlideError, printable

Config = TypeVar("Config")

_TYRO = threading.Lock()
"""tyro keeps its state in globals while it parses; ranks that are threads parse at the same time."""

OK, FAILED, USAGE = 0, 1, 2
HELP = {"--help-all": "--help"}
"""Flag of ours -> that of tyro."""

ADVICE = {
    errno.ENOSPC: "make room on that disk, or name a folder on another (--out; TMPDIR for what is temporary)",
    errno.EDQUOT: "make room, or name a folder elsewhere (--out; TMPDIR for what is temporary)",
    errno.EROFS: "name a folder that can be written (--out; TMPDIR for what is temporary)",
    errno.EACCES: "change its rights, or name another file or folder",
    errno.EPERM: "change its rights, or name another file or folder",
    errno.EFBIG: "allow larger files (ulimit -f unlimited), or name a folder on a disk that takes them",
    errno.EMFILE: "allow more open files: ulimit -n 4096",
}
"""What a user can do about what the system says."""


class RunError(Exception):
    """A command that was asked rightly and could not be done: exit code 1, the message is all the user sees."""


def run_command(
    config_type: type[Config], body: Callable[[Config], int | None], argv: Sequence[str] | None, prog: str
) -> int:
    """Parse ``argv`` into ``config_type``, run ``body``, turn expected errors into one message and an exit code.

    Args:
        config_type: frozen dataclass; its docstring is the description, its fields' docstrings the help of the flags.
        body: gets the settings; returns an exit code or None for 0.
        argv: arguments after the program's name; those of the process by default.
        prog: how the user called it, for the usage line.
    """
    own_torch_cache()
    with ignore_broken_pipe():
        return _run(config_type, body, list(sys.argv[1:] if argv is None else argv), prog)


def _run(config_type: type[Config], body: Callable[[Config], int | None], argv: list[str], prog: str) -> int:
    try:
        config = parse(config_type, argv, prog)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else USAGE
    except ValueError as fault:
        return _fail(fault, USAGE, prog)
    if config is None:
        return OK
    try:
        faults = config.validate() if hasattr(config, "validate") else []
        if faults:
            raise ValueError("\n       ".join(faults))
        return body(config) or OK
    except ValueError as fault:
        return _fail(fault, USAGE, prog)
    except (RunError, SlideError, OSError, MemoryError) as fault:
        return _fail(fault, FAILED, prog)
    except KeyboardInterrupt:
        return _fail(RunError("interrupted"), FAILED, prog)


def _fail(fault: BaseException, code: int, prog: str) -> int:
    told = describe_system_error(fault) if isinstance(fault, OSError) else str(fault)
    told = printable(told, keep="\n\t")
    print(f"{prog}: error: {told or type(fault).__name__}", file=sys.stderr, flush=True)
    return code


def describe_system_error(fault: OSError) -> str:
    """Return what the system refuses, where, and what to do; what was raised with words of its own stays as it is."""
    advice = ADVICE.get(fault.errno or 0)
    if advice is None:
        return str(fault)
    where = f"{fault.filename}: " if fault.filename else ""
    return f"{where}{fault.strerror}; {advice}"


def _description(config_type: type[Any], more: bool) -> str:
    """Return the head of --help, wrapped: tyro joins lines, except those that begin with a blank or a dash."""
    width = max(40, min(shutil.get_terminal_size().columns, 120) - 1)
    purpose = textwrap.fill(" ".join((config_type.__doc__ or "").split()), width, subsequent_indent=" ")
    lines = [
        "--config FILE.yaml reads settings from a file; flags win.",
        "--print-config prints the settings and stops.",
    ]
    if more:
        lines.append("--help-all shows rare flags, too.")
    return "\n".join((purpose, "", *lines))


def parse(config_type: type[Config], argv: list[str], prog: str) -> Config | None:
    """Return the settings, or None when ``--print-config`` asked only to see them.

    Raises:
        ValueError: a configuration file that cannot be read, or an unknown key in it.
        SystemExit: from tyro: 0 after ``--help``, 2 after a wrong flag or value.
    """
    argv, files = _take_option(argv, "--config", "a file name")
    from_files = [word for file in files for word in _read_yaml(config_type, Path(file))]
    show = "--print-config" in argv
    short = "--help" in argv or "-h" in argv
    shown: Any = without_rare(config_type) if short else config_type
    with _TYRO:
        config: Config = tyro.cli(
            shown,
            args=from_files + [HELP.get(word, word) for word in argv if word != "--print-config"],
            prog=prog,
            description=_description(config_type, short and any(flag.rare for flag in flags_of(config_type))),
            config=(tyro.conf.OmitArgPrefixes,),
        )
    if show:
        print(yaml.safe_dump(flat(config), sort_keys=False), end="")
        return None
    return config


def _take_option(argv: list[str], option: str, what: str) -> tuple[list[str], list[str]]:
    """``argv`` without ``option VALUE`` and ``option=VALUE``, and the values."""
    rest: list[str] = []
    values: list[str] = []
    arguments = iter(argv)
    for arg in arguments:
        if arg == option:
            value = next(arguments, None)
            if value is None:
                raise ValueError(f"{option} needs {what} after it")
            values.append(value)
        elif arg.startswith(option + "="):
            values.append(arg.removeprefix(option + "="))
        else:
            rest.append(arg)
    return rest, values


def _takes(hint: Any, values: list[Any]) -> bool:
    """Return whether a setting of type ``hint`` takes several values, and these are no lists themselves."""
    several = any(get_origin(each) in (tuple, list) for each in (hint, *get_args(hint)))
    return several and not any(isinstance(value, list | dict) for value in values)


def _read_yaml(config_type: type, path: Path) -> list[str]:
    """Return the flags that say the same as a YAML file, so that types and messages are those of the command line."""
    try:
        loaded = settings_of(read_data(path))
    except ValueError as fault:
        raise ValueError(f"--config {fault}") from fault
    known = {flag.name: flag.type for flag in flags_of(config_type)}
    faults: list[str] = []
    arguments: list[str] = []
    for key, value in loaded.items():
        name = str(key).replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            faults.append(f"unknown key `{key}`" + (f"; did you mean `{near[0]}`?" if near else ""))
        elif known[name] is bool and not isinstance(value, bool):
            faults.append(f"key `{key}` takes true or false, found {value!r}")
        elif isinstance(value, dict) or (isinstance(value, list) and not _takes(known[name], value)):
            faults.append(f"key `{key}` does not take {value!r:.60}")
        else:
            arguments += arguments_for({name: value if known[name] is bool or isinstance(value, list) else str(value)})
    if faults:
        raise ValueError(f"--config {path}: " + "; ".join(faults) + f"\n       known keys: {', '.join(sorted(known))}")
    return arguments
