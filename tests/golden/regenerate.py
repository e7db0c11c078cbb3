"""``make golden``: write anew what is kept to be compared, from the code as it stands.

``flags.txt`` is the command-line surface, one line per setting with its default; ``docs/developer.md`` has those that
are no flags, with their docstrings; ``schedules`` has small schedules as the papers draw them, one row a rank. Look at
the diff before committing it.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import itertools
import re
from pathlib import Path
from typing import get_type_hints

from app.settings.fields import BLOCK, developer_settings, flags_of
from parallel.schedule.registry import PIPEDREAM, SCHEDULES, build_schedule, mesh_for
from parallel.schedule.text import to_csv

ROOT = Path(__file__).parents[2]
FLAGS = ROOT / "tests" / "golden" / "flags.txt"
DEVELOPER = ROOT / "docs" / "developer.md"
SCHEDULE_FILES = ROOT / "tests" / "golden" / "schedules"
COMMANDS = {
    "app.convert": "ConvertCommand",
    "app.doctor": "DoctorCommand",
    "app.evaluate": "EvaluateCommand",
    "app.index": "IndexCommand",
    "app.bench": "BenchCommand",
    "app.plan": "PlanCommand",
    "app.predict": "PredictCommand",
    "app.report": "ReportCommand",
    "app.synth": "SynthCommand",
    "app.train": "RunConfig",
    "app.verify": "VerifyCommand",
}
SETTINGS = re.compile(r"<!-- settings -->\n.*<!-- end of settings -->", re.DOTALL)


def flags() -> str:
    """Every flag of every command with its default, and every developer setting."""
    lines = []
    for module, name in COMMANDS.items():
        config_type = getattr(importlib.import_module(module), name)
        defaults = _defaults(config_type)
        lines += [f"{module} --{flag.replace('_', '-')} {defaults[flag]}" for flag, _ in flags_of(config_type)]
        lines += [f"{module} {BLOCK}: {name} {defaults[name]}" for name in developer_settings(config_type)]
    return "\n".join(lines) + "\n"


def _defaults(config_type: type) -> dict[str, str]:
    found: dict[str, str] = {}
    for field in dataclasses.fields(config_type):
        if field.default_factory is not dataclasses.MISSING:
            found |= _defaults(field.default_factory)  # type: ignore[arg-type]  # each factory is a dataclass
        elif field.default is dataclasses.MISSING:
            found[field.name] = "(required)"
            if field.name == "data":
                found |= _defaults(importlib.import_module("app.settings.run").DataSettings)
        else:
            found[field.name] = str(field.default)
    return found


def developer_table() -> str:
    """A row for each developer setting: its default, the commands that have it, and its docstring."""
    commands: dict[str, list[str]] = {}
    given: dict[str, list[str]] = {}
    told: dict[str, str] = {}
    for module, name in COMMANDS.items():
        config_type = getattr(importlib.import_module(module), name)
        defaults, docs = _defaults(config_type), _docstrings(config_type)
        for setting in developer_settings(config_type):
            commands.setdefault(setting, []).append(module)
            given.setdefault(setting, []).append(defaults[setting] or "(empty)")
            told.setdefault(setting, docs[setting])
    rows = [
        f"| `{name}` | {', '.join(dict.fromkeys(given[name]))} | {', '.join(commands[name])} | {told[name]} |"
        for name in sorted(commands)
    ]
    return "\n".join(["| key | default | of | meaning |", "|---|---|---|---|", *rows]) + "\n"


def _docstrings(config_type: type) -> dict[str, str]:
    """Of the fields of a dataclass and of those nested in it, on one line each."""
    found: dict[str, str] = {}
    for hint in get_type_hints(config_type).values():
        if dataclasses.is_dataclass(hint):
            found |= _docstrings(hint)  # type: ignore[arg-type]  # a class, never an instance, stands in a type hint
    (body,) = (node.body for node in ast.parse(inspect.getsource(config_type)).body if isinstance(node, ast.ClassDef))
    for field, doc in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
            found[ast.unparse(field.target)] = " ".join(str(doc.value.value).split())
    return found


def page_with_developer_settings(text: str) -> str:
    """``text`` with its table of developer settings replaced by today's."""
    return SETTINGS.sub(lambda _: f"<!-- settings -->\n{developer_table()}<!-- end of settings -->", text)


def schedules() -> dict[str, str]:
    """``NAME-D-m.csv`` -> its text, for a handful of each schedule; interleaved with 2 chunks a rank."""
    found = {}
    for name, kind in (SCHEDULES | {PIPEDREAM.name: PIPEDREAM}).items():
        for depth, m in [(2, 2), (4, 2)] if name == "mast" else [(2, 4), (3, 5), (4, 4), (4, 8)]:
            mesh = mesh_for(name, groups=1, depth=depth, chunks=2 if kind.chunks else 1)
            found[f"{name}-{depth}-{m}.csv"] = to_csv(build_schedule(name, mesh, m))
    return found


def main() -> None:
    FLAGS.write_text(flags())
    for name, text in schedules().items():
        (SCHEDULE_FILES / name).write_text(text)
    DEVELOPER.write_text(page_with_developer_settings(DEVELOPER.read_text()))


if __name__ == "__main__":
    main()
