"""No file of data runs code: which loaders the sources may call, and what they do with a file that tries."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.settings.cli import _read_yaml
from app.settings.run import RunConfig

ROOT = Path(__file__).parents[1]
LOADERS = {"open", "open_group", "load", "loads", "load_all", "safe_load", "unsafe_load", "full_load"}
CALL = re.compile(rf"\.({'|'.join(LOADERS)})\(")
FOLDERS = ("app", "pipelines", "models", "parallel", "benchmarks", "tools", "demo")


def calls() -> Iterator[tuple[str, str, dict[str, str]]]:
    """(file:line, dotted name, keyword arguments as text) of every call of ``LOADERS`` in the sources."""
    for path in sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if CALL.search(text) else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOADERS:
                where = f"{path.relative_to(ROOT)}:{node.lineno}"
                yield where, ast.unparse(node.func), {k.arg or "**": ast.unparse(k.value) for k in node.keywords}


def fault(name: str, keywords: dict[str, str]) -> str | None:
    if name == "Image.open" and "formats" not in keywords:
        return "Pillow must be told the formats: some of its readers start programs"
    if name == "torch.load" and keywords.get("weights_only", "True") != "True":
        return "torch.load runs code from the file"
    if name in ("np.load", "numpy.load") and keywords.get("allow_pickle", "False") != "False":
        return "numpy runs code from the file"
    if name in ("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load"):
        return "YAML is read with safe_load"
    if name in ("pickle.load", "pickle.loads", "dill.load", "joblib.load", "marshal.loads", "shelve.open"):
        return "pickles run code"
    if name in ("zarr.open", "zarr.open_group"):
        return "Zarr arrays are opened once their codecs are allowed"
    return None


def test_the_sources_call_no_loader_that_runs_code_from_a_file() -> None:
    seen = list(calls())
    assert sum(name in ("torch.load", "yaml.safe_load", "Image.open") for _, name, _ in seen) > 8
    wrong = [f"{where} {name}: {why}" for where, name, keywords in seen if (why := fault(name, keywords))]
    # Benchmarks write the Zarr stores that they open.
    assert [line for line in wrong if not (line.startswith("benchmarks/") and " zarr." in line)] == []


def test_a_yaml_file_makes_no_objects(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"out: !!python/object/apply:os.mkdir ['{tmp_path / 'ran'}']\n")
    with pytest.raises(ValueError, match=r"--config .*run\.yaml cannot be read: could not determine a constructor"):
        _read_yaml(RunConfig, path)
    assert not (tmp_path / "ran").exists()
