"""``app.synth`` as a user calls it: what it says and its exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from app import synth


def test_makes_slides_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(tmp_path), "--slides", "2", "--size", "600", "--workers", "1"]
    assert synth.main(arguments) == 0
    assert "2 slides made" in capsys.readouterr().out
    assert synth.main(arguments) == 0
    assert "0 slides made, 2 were there already" in capsys.readouterr().out


def test_faults_are_told_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert synth.main([str(tmp_path / "out"), "--slides", "0", "--size", "511", "--mpp", "0"]) == 2
    said = capsys.readouterr().err
    for fault in ("--slides is at least 1; got 0", "--size is 512 to 200000 px; got 511", "--mpp is 0.05 to 100"):
        assert fault in said
    assert not (tmp_path / "out").exists()


def test_another_collection_in_the_folder_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert synth.main([str(tmp_path), "--slides", "1", "--size", "600"]) == 0
    assert synth.main([str(tmp_path), "--slides", "1", "--size", "600", "--seed", "1"]) == 2
    assert "holds other artificial slides (seed 0, asked 1)" in capsys.readouterr().err


def test_an_unwritable_folder_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert synth.main([str(tmp_path / "file"), "--slides", "1", "--size", "600"]) == 1
    assert "cannot be written" in capsys.readouterr().err
