from __future__ import annotations

import errno
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
import yaml

from app.settings.cli import RunError, parse, run_command
from app.settings.fields import arguments_for, flat
from app.settings.run import DataSettings, RunConfig
from pipelines.slides.rare import Rare
from pipelines.slides.slide import SlideError

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Part:
    lr: float = 0.1
    """Learning rate."""
    kind: Literal["sgd", "adamw"] = "sgd"
    """Rule."""
    window: Rare[int | None] = None
    """Bytes."""


@dataclass(frozen=True)
class Settings:
    """A command."""

    slides: Path
    """Folder."""
    part: Part = field(default_factory=Part)
    resume: bool = False
    """Continue."""
    read_ahead: Rare[str] = "1GiB"
    """Size."""
    compile: Rare[bool] = False
    """Compile."""

    def validate(self) -> list[str]:
        return [f"--lr must be above 0; got {self.part.lr}"] * (self.part.lr <= 0) + ["no resume"] * self.resume


def run(argv: list[str], body=None) -> tuple[int, list[Settings]]:
    seen: list[Settings] = []
    return run_command(Settings, body or seen.append, argv, "prog"), seen


def test_threads_parse_side_by_side() -> None:
    """Ranks of one process did: "Unrecognized options", seldom. tyro keeps its state in globals."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            parsed = list(pool.map(lambda _: parse(Settings, ["--slides", "a", "--lr", "0.25"], "prog"), range(40)))
    finally:
        sys.setswitchinterval(interval)
    assert {settings.part.lr for settings in parsed if settings} == {0.25}


def test_flags_override_the_file_and_the_file_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("slides: a\nlr: 0.5\nkind: adamw\nread-ahead: 2GiB\nwindow: 3\n")
    code, (settings,) = run(["--config", str(file), "--lr", "0.25", "--window", "4", "--compile"])
    assert code == 0
    assert settings == Settings(Path("a"), Part(0.25, "adamw", 4), read_ahead="2GiB", compile=True)


def test_settings_of_an_older_run_are_read(tmp_path: Path) -> None:
    """Rare ones once stood in a block of their own."""
    file = tmp_path / "config.yaml"
    file.write_text("slides: a\ndeveloper:\n  window: 3\n")
    assert run(["--config", str(file)]) == (0, [Settings(Path("a"), Part(window=3))])


def test_printed_config_reads_back_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--slides", "b", "--kind", "adamw", "--read-ahead", "", "--print-config"]) == (0, [])
    file = tmp_path / "run.yaml"
    file.write_text(capsys.readouterr().out)
    printed = yaml.safe_load(file.read_text())
    assert printed["kind"] == "adamw"
    assert (printed["window"], printed["read_ahead"], printed["compile"]) == (None, "", False)
    assert run(["--config", str(file)])[1] == [Settings(Path("b"), Part(kind="adamw"), read_ahead="")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("slidez: a\n", "unknown key `slidez`; did you mean `slides`"),
        ("- a\n- b\n", "expected `key: value` lines, found a list"),
        ("slides: a\nresume: 3\n", "key `resume` takes true or false, found 3"),
        ("slides: [\n", "cannot be read"),
        ("slides: a\nread_ahed: 3\n", "unknown key `read_ahed`; did you mean `read_ahead`?"),
    ],
)
def test_faulty_file_is_a_usage_error(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert run(["--config", str(file)]) == (2, [])
    assert message in capsys.readouterr().err


def test_missing_file_and_missing_file_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--config", "nowhere.yaml"])[0] == 2
    assert "nowhere.yaml cannot be read" in capsys.readouterr().err
    assert run(["--config"])[0] == 2
    assert "needs a file name" in capsys.readouterr().err


def test_unknown_flag_value_and_missing_flag_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--slides", "a", "--kind", "adam"])[0] == 2
    assert "adamw" in capsys.readouterr().err
    assert run(["--slides", "a", "--nonsense", "1"])[0] == 2
    assert "--nonsense" in capsys.readouterr().err
    assert run(["--slides", "a", "--window", "wide"])[0] == 2
    assert "--window" in capsys.readouterr().err
    assert run([])[0] == 2
    assert "--slides" in capsys.readouterr().err


def test_all_faults_of_the_settings_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--slides", "a", "--lr", "-1", "--resume"]) == (2, [])
    said = capsys.readouterr().err
    assert "--lr must be above 0" in said
    assert "no resume" in said


@pytest.mark.parametrize(
    ("fault", "code"),
    [(ValueError("bad tile"), 2), (RunError("bad run"), 1), (SlideError("bad slide"), 1), (OSError("bad disk"), 1)],
)
def test_expected_errors_are_one_message_and_a_code(
    fault: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def body(settings: Settings) -> int:
        raise fault

    assert run(["--slides", "a"], body)[0] == code
    assert capsys.readouterr().err == f"prog: error: {fault}\n"


def test_help_ends_with_zero_and_shows_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"])[0] == 0
    said = capsys.readouterr().out
    assert "default: 0.1" in said
    assert "--config" in said
    assert "--help-all shows rare flags" in " ".join(said.split())
    assert "--read-ahead" not in said
    assert "--kind" in said
    assert run(["--help-all"])[0] == 0
    whole = capsys.readouterr().out
    assert "--read-ahead" in whole
    assert "Bytes." in whole


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device; make room on that disk, or name"),
        (
            OSError(errno.EROFS, "Read-only file system", "runs/a"),
            "runs/a: Read-only file system; name a folder",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "x.svs"),
            "x.svs: Permission denied; change its rights",
        ),
        (OSError(errno.EMFILE, "Too many open files", "y"), "y: Too many open files; allow more open files: ulimit -n"),
        (OSError("words of our own"), "words of our own"),
    ],
)
def test_what_the_system_refuses_is_told_with_its_mend(
    fault: OSError, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def body(_: Settings) -> None:
        raise fault

    assert run(["--slides", "a"], body)[0] == 1
    assert capsys.readouterr().err.startswith(f"prog: error: {told}")


@pytest.mark.process
@pytest.mark.parametrize(
    ("options", "reason", "mend"),
    [("size=40k", "No space left", "name a folder"), ("ro", "Read-only file system", "name another with --out")],
)
def test_indexing_where_there_is_no_room(options: str, reason: str, mend: str, tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o {options} none {tmp_path} && exec "
    index = f"{sys.executable} -m app.index --slides data/real --tile 512 --out {tmp_path}/run"
    able = subprocess.run(["unshare", "-rm", "sh", "-c", mount + "true"], capture_output=True, text=True, timeout=20)
    if able.returncode:
        pytest.skip(f"no file system of its own can be made here: {able.stderr.strip()}")
    command = ["unshare", "-rm", "sh", "-c", mount + index]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    (error,) = done.stderr.splitlines()
    assert reason in error
    assert mend in error


@pytest.mark.parametrize("entries", [(), ("Fat=background", "Immune cells=ignore")])
def test_settings_as_words_are_read_as_they_were(entries: tuple[str, ...]) -> None:
    """What ``app.bench`` starts ``app.train`` with."""
    data = DataSettings(Path("slides"), class_map=entries, index_workers=3)
    read: list[RunConfig] = []
    assert run_command(RunConfig, read.append, arguments_for(flat(data)), "python -m app.train") == 0
    assert [config.data for config in read] == [data]
