"""``make golden``: write anew what is kept to be compared, from the code as it stands.

``flags.txt`` is the command-line surface, one line per setting with its default; ``docs/developer.md`` has those that
are no flags, with their docstrings; ``docs/files.md`` has the first line of each module's docstring as its caption;
``schedules`` has small schedules as the papers draw them, one row a rank; ``docs/results.md`` has the tables of the
benchmarks' READMEs. Look at the diff before committing it.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import itertools
import re
import subprocess
from pathlib import Path
from typing import get_type_hints

from app.settings.fields import BLOCK, developer_settings, flags_of
from parallel.schedule.registry import SCHEDULES, build_schedule, mesh_for
from parallel.schedule.text import to_csv

ROOT = Path(__file__).parents[2]
FLAGS = ROOT / "tests" / "golden" / "flags.txt"
FILES = ROOT / "docs" / "files.md"
RESULTS = ROOT / "docs" / "results.md"
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
SHOWN = ("app", "pipelines", "models", "parallel", "benchmarks", "configs", "demo", "data")
WRITTEN = re.compile(r"<!-- results[^>]*: written by the run -->\n(.*?)<!-- end of results[^>]*-->", re.DOTALL)
TABLE = re.compile(r"<!-- table of (\w+) -->\n.*?<!-- end of table -->", re.DOTALL)
LONG = 40
"""Lines of a table that a page does not show unless asked."""
SETTINGS = re.compile(r"<!-- settings -->\n.*<!-- end of settings -->", re.DOTALL)
TREE_START, TREE_END = "<!-- tree: made by `make golden` -->\n```\n", "```\n<!-- end of tree -->"


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


def tracked() -> list[Path]:
    """Files of the checkout that git tracks."""
    listed = subprocess.run(["git", "ls-files", *SHOWN], cwd=ROOT, capture_output=True, text=True, check=True)
    return [Path(line) for line in listed.stdout.splitlines()]


def caption(path: Path) -> str:
    """First sentence of a module's docstring, or first comment of a YAML file."""
    text = (ROOT / path).read_text()
    if path.suffix == ".py":
        doc = ast.get_docstring(ast.parse(text)) or ""
        return doc.split("\n\n")[0].replace("\n", " ").replace("``", "").strip()
    return text.splitlines()[0].removeprefix("# ").strip()


def tree() -> str:
    """The folders, one line per file that has a caption."""
    lines: list[str] = []
    folder = None
    for path in sorted((p for p in tracked() if p.suffix in (".py", ".yaml")), key=lambda p: (p.parent.parts, p.name)):
        if path.parent != folder:
            folder = path.parent
            init = ROOT / folder / "__init__.py"
            lines.append(f"{folder}/".ljust(34) + (caption(folder / "__init__.py") if init.exists() else ""))
        if path.name != "__init__.py":
            lines.append(f"  {path.name}".ljust(34) + caption(path))
    return "\n".join(line.rstrip() for line in lines) + "\n"


def page_with_tree(text: str) -> str:
    """``text`` with its folder tree replaced by today's."""
    head, _, rest = text.partition(TREE_START)
    _, _, tail = rest.partition(TREE_END)
    return head + TREE_START + tree() + TREE_END + tail


def measured(benchmark: str) -> str:
    """What a benchmark's README has measured: what its run has written there, else its tables."""
    text = (ROOT / "benchmarks" / benchmark / "README.md").read_text()
    written = WRITTEN.findall(text)
    if not written:
        runs = itertools.groupby(text.splitlines(), key=lambda line: line.startswith("|"))
        written = ["\n".join(lines) + "\n" for is_table, lines in runs if is_table]
    return "\n".join(part.strip() + "\n" for part in written)


def page_with_results(text: str) -> str:
    """``text`` with the tables of benchmarks that it names replaced by today's."""

    def of(found: re.Match[str]) -> str:
        table = measured(found[1])
        if table.count("\n") > LONG:
            table = f"<details><summary>All rows</summary>\n\n{table}\n</details>\n"
        return f"<!-- table of {found[1]} -->\n\n{table}\n<!-- end of table -->"

    return TABLE.sub(of, text)


def schedules() -> dict[str, str]:
    """``NAME-D-m.csv`` -> its text, for a handful of each schedule; interleaved with 2 chunks a rank."""
    found = {}
    for name, kind in SCHEDULES.items():
        for depth, m in [(2, 2), (4, 2)] if name == "mast" else [(2, 4), (3, 5), (4, 4), (4, 8)]:
            mesh = mesh_for(name, groups=1, depth=depth, chunks=2 if kind.chunks else 1)
            found[f"{name}-{depth}-{m}.csv"] = to_csv(build_schedule(name, mesh, m))
    return found


def main() -> None:
    FLAGS.write_text(flags())
    for name, text in schedules().items():
        (SCHEDULE_FILES / name).write_text(text)
    FILES.write_text(page_with_tree(FILES.read_text()))
    RESULTS.write_text(page_with_results(RESULTS.read_text()))
    DEVELOPER.write_text(page_with_developer_settings(DEVELOPER.read_text()))


if __name__ == "__main__":
    main()
