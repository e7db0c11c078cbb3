"""Import rules that import-linter cannot see: those about parts of a package, and where ours come from."""

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("app", "pipelines", "models", "parallel")


@functools.cache
def imports(path):
    """Modules that ``path`` imports anywhere, with what is taken from them."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
    return tuple(names)


def importers(prefix):
    """Files of ours that import ``prefix`` or something below it."""
    return {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if any(name == prefix or name.startswith(prefix + ".") for name in imports(path))
    }


@pytest.mark.parametrize(
    ("library", "allowed"),
    [
        ("torch.distributed", ("parallel/comm/torch_",)),
        ("openslide", ("pipelines/backends/", "app/training/run_info.py", "app/checks/")),
        ("imagecodecs", ("pipelines/backends/", "app/training/run_info.py", "app/checks/")),
        ("tifffile", ("pipelines/backends/", "app/training/run_info.py", "app/checks/")),
        ("zarr", ("pipelines/backends/", "app/training/run_info.py", "app/checks/")),
    ],
)
def test_library_is_imported_only_where_it_belongs(library, allowed):
    found = importers(library)
    assert {path for path in found if not path.startswith(allowed)} == set()
    assert found, f"nothing imports {library}: the rule is about nothing"


def test_only_the_device_feed_lets_torch_into_the_data_side():
    assert {path for path in importers("torch") if path.startswith("pipelines/")} == {
        "pipelines/stream/device.py",
        "pipelines/stream/device_batch.py",
        "pipelines/stream/device_pixels.py",
    }


@pytest.mark.parametrize("name", PACKAGES)
def test_our_packages_are_the_ones_imported(name):
    module = __import__(name)
    assert module.__file__ is not None
    assert Path(module.__file__).parent == ROOT / name


@pytest.mark.process
def test_commands_that_need_no_torch_do_not_load_it():
    import subprocess
    import sys

    for module in ("app.train", "app.index", "app.synth", "app.report", "app.verify"):
        code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{module} loads torch before it knows what to do: {done.stderr}"
