from __future__ import annotations

from pathlib import Path

import pytest

from tests.app.bad_inputs import CASES, Case, carry_out


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name.replace(" ", "-"), marks=[pytest.mark.process] if case.prefix else [])
        for case in CASES
    ],
)
def test_wrong_input_has_one_clear_message_and_its_exit_code(case: Case, tmp_path: Path) -> None:
    done = carry_out(case, tmp_path)
    said = done.stdout + done.stderr
    for part in (case.says, *case.also):
        assert part in said
    assert done.returncode == case.code, said
    assert "Traceback" not in said
