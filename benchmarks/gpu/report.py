"""Rows of all parts, as JSON and as Markdown, written anew after each row: a run that is cut off leaves what it had.

Takes rows by part; gives text. A part is a module with ``rows``, ``HEADER`` and ``line``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.gpu.setting import Row
from benchmarks.results import markdown_table

JSON_NAME, TEXT_NAME = "gpu.json", "gpu.md"


def write(out: Path, result: dict[str, Any], parts: Mapping[str, ModuleType]) -> None:
    """Into the folder ``out``."""
    (out / JSON_NAME).write_text(json.dumps(result, indent=2) + "\n")
    (out / TEXT_NAME).write_text(text_of(result, parts))


def text_of(result: dict[str, Any], parts: Mapping[str, ModuleType]) -> str:
    """Return the measurements, part by part."""
    lines = [f"Device: {result['device']}; driver {result['driver']}. {result['link']}\n", _verdict(result)]
    if not result["gpu"]:
        lines.append("No GPU was there: sizes are tiny, and these figures show that everything runs, nothing more.\n")
    for name, part in parts.items():
        found = result["parts"].get(name)
        if found is None:
            continue
        title = (part.__doc__ or "").splitlines()[0]
        lines.append(f"### {name}\n\n{title}\n\n{table_of(found['rows'], part)}")
        if found.get("fault"):
            lines.append(f"The part ended early: {found['fault']}.\n")
    lines.append(f"Written by `{result['command']}`: {result['environment']}.\n")
    return "\n".join(lines)


def failures(result: dict[str, Any]) -> list[str]:
    """Return what did not pass: rows that say so, and a smoke part that ended early."""
    found = [str(row.get("name", _named(row))) for row in _rows(result) if row.get("passed") is False]
    return found + ["the smoke part ended early"] * ("fault" in result["parts"].get("smoke", {}))


def _verdict(result: dict[str, Any]) -> str:
    """Return what came of the rows that pass or fail, as a line."""
    states = [row["passed"] for row in _rows(result) if "passed" in row]
    said = f"Of {len(states)} rows that pass or fail, {states.count(True)} passed, {states.count(None)} were not run"
    failed = failures(result)
    return f"{said}, and {len(failed)} FAILED: {'; '.join(failed)}.\n" if failed else f"{said}, none failed.\n"


def _rows(result: dict[str, Any]) -> list[Row]:
    return [row for part in result["parts"].values() for row in part["rows"]]


def table_of(rows: list[Row], part: ModuleType) -> str:
    """Return rows as a table, and faults below it."""
    good = [row for row in rows if "fault" not in row]
    faults = "".join(f"- {_named(row)}: {row['fault']}\n" for row in rows if "fault" in row)
    table = markdown_table(part.HEADER, [part.line(row) for row in good]) if good else "Nothing was measured.\n"
    return table + (f"\n{faults}" if faults else "")


def _named(row: Row) -> str:
    """Return the fields of a row but its fault."""
    return ", ".join(f"{key} {value}" for key, value in row.items() if key != "fault" and value is not None)
