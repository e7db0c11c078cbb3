"""``make golden``: write anew what is kept to be compared, from the code as it stands.

``flags.txt`` is the command-line surface, one line per flag with its default; ``schedules`` has small schedules as the
papers draw them, one row a rank. Look at the diff before committing it.
"""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

from app.settings.fields import flags_of
from parallel.schedule.registry import PIPEDREAM, SCHEDULES, build_schedule, mesh_for
from parallel.schedule.text import to_csv

ROOT = Path(__file__).parents[2]
FLAGS = ROOT / "tests" / "golden" / "flags.txt"
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


def flags() -> str:
    """Every flag of every command with its default."""
    lines = []
    for module, name in COMMANDS.items():
        config_type = getattr(importlib.import_module(module), name)
        defaults = _defaults(config_type)
        lines += [
            f"{module} --{flag.replace('_', '-')} {defaults[flag]}{' (rare)' * rare}"
            for flag, _, rare in sorted(flags_of(config_type), key=lambda flag: flag.rare)
        ]
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


if __name__ == "__main__":
    main()
