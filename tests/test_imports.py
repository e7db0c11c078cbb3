"""Import rules that import-linter cannot see: those about parts of a package, and where ours come from."""

import ast
import functools
import subprocess
import sys
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


def importers(prefix, packages=PACKAGES):
    """Files of ours that import ``prefix`` or something below it."""
    paths = [path for package in packages for path in (ROOT / package).rglob("*.py") if prefix in path.read_text()]
    return {
        str(path.relative_to(ROOT))
        for path in paths
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
    names = ("device", "device_batch", "device_pixels")
    assert importers("torch", ["pipelines"]) == {f"pipelines/stream/{name}.py" for name in names}


@pytest.mark.parametrize("name", PACKAGES)
def test_our_packages_are_the_ones_imported(name):
    assert Path(__import__(name).__file__).parent == ROOT / name


@pytest.mark.process
def test_commands_that_need_no_torch_do_not_load_it():
    """Before they know what to do; the watchdog and the processes of an index never do."""
    names = "app.train app.index app.synth app.report app.verify app.training.run_info app.launch.watchdog_process"
    loop = f"for name in '{names} pipelines.tiles.slide_index'.split():\n    importlib.import_module(name)\n"
    code = f"import sys, importlib\n{loop}    if 'torch' in sys.modules: sys.exit(name)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"loads torch, or fails: {done.stderr}"
