"""The examples of docs/python.md run as they stand, its notebook has the same, and the names in its table exist."""

import contextlib
import importlib
import io
import json
import re
from pathlib import Path

import pytest

PAGE_PATH = Path(__file__).parents[1] / "docs" / "python.md"
PAGE = PAGE_PATH.read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize(("number", "prints"), [(0, r"loss \d+\.\d{4}, 122 tensors"), (1, r"0F0,.*\n1F0,")])
def test_examples_run(number, prints):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(EXAMPLES[number], "docs/python.md", "exec"), {"__name__": "example"})
    assert re.search(prints, out.getvalue())


def test_names_exist():
    names = re.findall(r"^\| `([\w.]+)` \|", PAGE, re.MULTILINE)
    assert len(names) == 4
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


def test_the_notebook_has_the_same_examples():
    cells = json.loads((PAGE_PATH.with_suffix(".ipynb")).read_text())["cells"]
    assert ["".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "code"] == EXAMPLES
