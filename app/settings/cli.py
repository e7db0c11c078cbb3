"""The command line that every ``python -m app.*`` shares, and tables on standard output.

Takes a frozen dataclass (nested ones are flattened: every field is one flag and one YAML key) and a body; returns the
exit code: 0 done, 1 failed, 2 wrong usage. ``--help`` leaves ``Rare`` fields out, ``--help-all`` shows all.
``--config FILE.yaml`` is read before the other flags, so flags win; ``--print-config`` writes the resolved settings as
YAML and stops. The errors that a settings class's ``validate()`` returns are printed together before anything runs.
Tables are drawn on a terminal; elsewhere their columns are aligned and no line is broken, for ``grep`` and log files.
"""

from __future__ import annotations

import difflib
import errno
import io
import os
import shutil
import stat
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TextIO, TypeVar, get_args, get_origin

import tyro
import yaml
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from app.settings.fields import arguments_for, flags_of, flat, for_help, read_data
from parallel.profile.cache import own_torch_cache
from pipelines.slides.slide import SlideError, printable

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

COLOURS = {"ok": "green", "warning": "yellow", "FAULT": "bold red"}
NARROW = 14
"""Most characters of a column that is not broken on a terminal."""
Config = TypeVar("Config")
_TYRO = threading.Lock()
"""tyro keeps its state in globals while it parses; ranks that are threads parse at the same time."""
OK, FAILED, USAGE = 0, 1, 2
ADVICE = {
    errno.ENOSPC: "make room on that disk, or name a folder on another (--out; TMPDIR for what is temporary)",
    errno.EDQUOT: "make room, or name a folder elsewhere (--out; TMPDIR for what is temporary)",
    errno.EROFS: "name a folder that can be written (--out; TMPDIR for what is temporary)",
    errno.EACCES: "change its rights, or name another file or folder",
    errno.EPERM: "change its rights, or name another file or folder",
    errno.EFBIG: "allow larger files (ulimit -f unlimited), or name a folder on a disk that takes them",
    errno.EMFILE: "allow more open files: ulimit -n 4096",
}
"""Advice by error number of the system."""


class _Drained(io.FileIO):
    def write(self, data: ReadableBuffer) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


@contextmanager
def ignore_broken_pipe() -> Iterator[None]:
    """Ignore BrokenPipeError inside this block, as in ``app.plan | head``."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_drained, before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before


def _drained(stream: TextIO) -> TextIO:
    try:
        descriptor = stream.fileno()
    except (OSError, AttributeError, ValueError):  # no file at all, as where output is captured
        return stream
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return stream
    stream.flush()
    raw = _Drained(descriptor, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=stream is sys.stderr)


@dataclass(frozen=True)
class Finding:
    """One thing looked at. FAULT: training would fail; warning: it may, or will be slow; note: good to know."""

    state: Literal["ok", "note", "warning", "FAULT"]
    name: str
    text: str


def print_table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print ``rows`` under ``headers`` (all empty: none) and ``title``; cells that name a state are coloured."""
    if sys.stdout.isatty():
        table = Table(title=Text(title), title_justify="left", show_header=any(headers), title_style="bold")
        table.box, table.pad_edge, table.padding = None, False, (0, 2, 0, 0)
        for number, header in enumerate(headers):
            widest = max(cell_len(row[number]) for row in (headers, *rows))
            table.add_column(header, overflow="fold", no_wrap=widest <= NARROW)  # the wide ones share what is left
        for row in rows:
            table.add_row(*(Text(cell, style=COLOURS.get(cell, "")) for cell in row))
        print()
        Console().print(table)
        return
    print(f"\n{title}")
    lines = [headers, *rows] if any(headers) else list(rows)
    widths = [max((cell_len(line[i]) for line in lines), default=0) for i in range(len(headers))]
    for line in lines:
        padded = (cell + " " * (width - cell_len(cell)) for cell, width in zip(line, widths, strict=True))
        print(("  " + "  ".join(padded)).rstrip(), flush=True)


class RunError(Exception):
    """A failure of a correct command: exit code 1, and the message alone is printed."""


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
        try:
            return _run(config_type, body, list(sys.argv[1:] if argv is None else argv), prog)
        except ValueError as fault:
            return _fail(fault, USAGE, prog)
        except (RunError, SlideError, OSError, MemoryError) as fault:
            return _fail(fault, FAILED, prog)
        except KeyboardInterrupt:
            return _fail(RunError("interrupted"), FAILED, prog)


def _run(config_type: type[Config], body: Callable[[Config], int | None], argv: list[str], prog: str) -> int:
    try:
        config = parse(config_type, argv, prog)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else USAGE
    if config is None:
        return OK
    if faults := config.validate() if hasattr(config, "validate") else []:
        raise ValueError("\n       ".join(faults))
    return body(config) or OK


def _fail(fault: BaseException, code: int, prog: str) -> int:
    told = printable(describe_system_error(fault) if isinstance(fault, OSError) else str(fault), keep="\n\t")
    print(f"{prog}: error: {told or type(fault).__name__}", file=sys.stderr, flush=True)
    return code


def describe_system_error(fault: OSError) -> str:
    """Return the error of the system, its file, and advice; errors without a known number stay as they are."""
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
    argv, files = _take_config(argv)
    from_files = [word for file in files for word in _read_yaml(config_type, Path(file))]
    show = "--print-config" in argv
    short = "--help" in argv or "-h" in argv
    helps = short or "--help-all" in argv
    shown: Any = for_help(config_type, rare=not short) if helps else config_type
    with _TYRO:
        config: Config = tyro.cli(
            shown,
            args=from_files + ["--help" if word == "--help-all" else word for word in argv if word != "--print-config"],
            prog=prog,
            description=_description(config_type, short and any(flag.rare for flag in flags_of(config_type))),
            config=(tyro.conf.OmitArgPrefixes,),
        )
    if show:
        print(yaml.safe_dump(flat(config), sort_keys=False), end="")
        return None
    return config


def _take_config(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return ``argv`` without ``--config FILE`` and ``--config=FILE``, and the files."""
    rest: list[str] = []
    files: list[str] = []
    words = iter(argv)
    for word in words:
        name, equals, file = word.partition("=")
        if name != "--config":
            rest.append(word)
        elif found := (file if equals else next(words, None)):
            files.append(found)
        else:
            raise ValueError("--config needs a file name after it")
    return rest, files


def _read_yaml(config_type: type, path: Path) -> list[str]:
    """Return the flags of a YAML file, so that types and messages are those of the command line."""
    try:
        loaded = read_data(path)
    except ValueError as fault:
        raise ValueError(f"--config {fault}") from fault
    known = {flag.name: flag.type for flag in flags_of(config_type)}
    several = {name for name, hint in known.items() if {tuple, list} & {*map(get_origin, (hint, *get_args(hint)))}}
    faults: list[str] = []
    arguments: list[str] = []
    for key, value in loaded.items():
        name, values = str(key).replace("-", "_"), value if isinstance(value, list) else []
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            faults.append(f"unknown key `{key}`" + (f"; did you mean `{near[0]}`?" if near else ""))
        elif known[name] is bool and not isinstance(value, bool):
            faults.append(f"key `{key}` takes true or false, found {value!r}")
        elif value is None and NoneType not in get_args(known[name]):
            faults.append(f"key `{key}` is empty: give it a value, or leave it out")
        elif isinstance(value, dict) or (
            isinstance(value, list) and (name not in several or any(isinstance(each, list | dict) for each in values))
        ):
            faults.append(f"key `{key}` does not take {value!r:.60}")
        else:
            arguments += arguments_for({name: value if known[name] is bool or isinstance(value, list) else str(value)})
    if faults:
        raise ValueError(f"--config {path}: " + "; ".join(faults) + f"\n       known keys: {', '.join(sorted(known))}")
    return arguments
