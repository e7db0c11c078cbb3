"""Files of names and values: what is no such file is refused in one message with its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.plan import main
from app.report import main as report
from app.settings.data_file import read_data
from app.training.run_folder import RunFolder

ODD = [
    ("deep.yaml", "[" * 100_000, "nested"),
    ("deep.json", "[" * 100_000, "nested"),
    ("list.yaml", "- a\n- b\n", "list"),
    ("list.json", "[1]", "list"),
    ("word.yaml", "tile", "str"),
    ("cut.json", '{"a": ', "cannot be read"),
    ("empty.json", "", "cannot be read"),
    ("null.json", "null", "NoneType"),
    ("tabs.yaml", "a:\n\t- b", "cannot be read"),
    ("date.yaml", "a: 2026-13-41", "cannot be read"),
    ("code.yaml", "a: !!python/object/apply:os.system ['false']", "cannot be read"),
    ("latin.yaml", b"a: \xe9", "cannot be read"),
]


@pytest.mark.parametrize(("name", "content", "says"), ODD, ids=[name for name, *_ in ODD])
def test_what_holds_no_names_and_values_is_named(
    name: str, content: str | bytes, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=says) as fault:
        read_data(path)
    assert str(path) in str(fault.value)
    if path.suffix == ".yaml":
        assert main(["--config", str(path)]) == 2
        assert str(path) in capsys.readouterr().err
    else:
        folder = RunFolder(tmp_path)
        folder.config.write_text("")
        for kept, read in (("attempts.json", folder.attempts), ("summary.json", lambda: folder.tells_end(1))):
            path.rename(tmp_path / kept)
            with pytest.raises(ValueError, match=kept):
                read()
            path = tmp_path / kept
        assert report([str(tmp_path)]) == (0 if name == "empty.json" else 1)  # an empty one is as none
        assert path.name in capsys.readouterr().err or name == "empty.json"


@pytest.mark.parametrize(
    "content", ["{}", '{"begun": "1", "agents": [], "job": null, "ranks": []}', '{"begun": 1, "agents": 3, "job": 0}']
)
def test_a_record_of_attempts_of_other_types_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "attempts.json").write_text(content)
    with pytest.raises(ValueError, match=r"attempts\.json"):
        RunFolder(tmp_path).attempts()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("[1, 2]", "`tile` does not take"),
        ("{a: 1}", "`tile` does not take"),
        ("[" * 200 + "]" * 200, "`tile` does not take"),
        ("x", "--tile"),
        ("2026-01-01", "--tile"),
        ("null", "--tile"),
    ],
)
def test_values_of_the_wrong_type_are_named(
    value: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(f"tile: {value}\n")
    assert main(["--config", str(path)]) == 2
    assert says in capsys.readouterr().err


def test_names_and_values(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("")
    assert read_data(path) == {}
    path.write_text("a: 1\nb: [x]\n")
    assert read_data(path) == {"a": 1, "b": ["x"]}
