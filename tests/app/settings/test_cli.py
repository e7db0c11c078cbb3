"""The frame of the commands: flags and files of settings, help, errors, exit codes, tables and closed pipes."""

import ast
import errno
import inspect
import itertools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Literal

import pytest
import yaml

from app.plan import main as plan
from app.report import main as report
from app.settings.cli import RunError, parse, run_command
from app.settings.fields import arguments_for, flags_of, flat, read_data
from app.settings.run import DataSettings, RunConfig
from app.training.run_folder import RunFolder
from pipelines import Rare
from pipelines.slides.slide import SlideError
from tests.app.conftest import ROOT

CONFIG = RunConfig(DataSettings(Path("slides")))


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

    def validate(self):
        return [f"--lr must be above 0; got {self.part.lr}"] * (self.part.lr <= 0) + ["no resume"] * self.resume


def run(argv, body=None):
    seen = []
    return run_command(Settings, body or seen.append, argv, "prog"), seen


def test_threads_parse_side_by_side():
    """Ranks of one process did: "Unrecognized options", seldom. tyro keeps its state in globals."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            parsed = list(pool.map(lambda _: parse(Settings, ["--slides", "a", "--lr", "0.25"], "prog"), range(40)))
    finally:
        sys.setswitchinterval(interval)
    assert {settings.part.lr for settings in parsed if settings} == {0.25}


def test_flags_override_the_file_and_the_file_the_defaults(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("slides: a\nlr: 0.5\nkind: adamw\nread-ahead: 2GiB\nwindow: 3\n")
    code, (settings,) = run(["--config", str(file), "--lr", "0.25", "--window", "4", "--compile"])
    assert code == 0
    assert settings == Settings(Path("a"), Part(0.25, "adamw", 4), read_ahead="2GiB", compile=True)


def test_printed_config_reads_back_the_same(tmp_path, capsys):
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
        ("slides:\n", "key `slides` is empty: give it a value, or leave it out"),
        ("slides: [\n", "cannot be read"),
        ("slides: a\nread_ahed: 3\n", "unknown key `read_ahed`; did you mean `read_ahead`?"),
    ],
)
def test_faulty_file_is_a_usage_error(tmp_path, text, message, capsys):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert run(["--config", str(file)]) == (2, [])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--config", "nowhere.yaml"], "nowhere.yaml cannot be read"),
        (["--config"], "needs a file name"),
        (["--slides", "a", "--kind", "adam"], "adamw"),
        (["--slides", "a", "--nonsense", "1"], "--nonsense"),
        (["--slides", "a", "--window", "wide"], "--window"),
        ([], "--slides"),
    ],
)
def test_what_cannot_be_parsed_is_a_usage_error(argv, message, capsys):
    assert run(argv)[0] == 2
    assert message in capsys.readouterr().err


def test_all_faults_of_the_settings_are_told_at_once(capsys):
    assert run(["--slides", "a", "--lr", "-1", "--resume"]) == (2, [])
    said = capsys.readouterr().err
    assert "--lr must be above 0" in said
    assert "no resume" in said


def test_help_ends_with_zero_and_shows_defaults(capsys):
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
    ("fault", "code", "mend"),
    [
        *((ValueError("bad tile"), 2, ""), (RunError("bad run"), 1, ""), (SlideError("bad slide"), 1, "")),
        (OSError("words of our own"), 1, ""),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "make room on that disk"),
        (OSError(errno.EROFS, "Read-only file system", "runs/a"), 1, "name a folder"),
        (PermissionError(errno.EACCES, "Permission denied", "x.svs"), 1, "change its rights"),
        (OSError(errno.EMFILE, "Too many open files", "y"), 1, "ulimit -n"),
    ],
    ids=str,
)
def test_expected_errors_are_one_message_with_its_mend_and_a_code(fault, code, mend, capsys):
    def body(_):
        raise fault

    assert run(["--slides", "a"], body)[0] == code
    said = capsys.readouterr().err
    where = f"{fault.filename}: " if getattr(fault, "filename", None) else ""
    assert said.startswith(f"prog: error: {where}{getattr(fault, 'strerror', None) or fault}")
    assert said.count("\n") == 1
    assert mend in said


@pytest.mark.process
@pytest.mark.parametrize(
    ("options", "reason", "mend"),
    [("size=40k", "No space left", "name a folder"), ("ro", "Read-only file system", "name another with --out")],
)
def test_indexing_where_there_is_no_room(options, reason, mend, tmp_path):
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
def test_settings_as_words_are_read_as_they_were(entries):
    """``app.bench`` starts ``app.train`` with them."""
    data = DataSettings(Path("slides"), class_map=entries, index_workers=3)
    read = []
    assert run_command(RunConfig, read.append, arguments_for(flat(data)), "python -m app.train") == 0
    assert [config.data for config in read] == [data]


def test_every_flag_has_its_own_name_and_help():
    names = [flag.name for flag in flags_of(RunConfig)]
    assert len(names) == len(set(names))
    parts = {name: value for name, value in vars(CONFIG).items() if is_dataclass(value)}
    for config in (CONFIG, *parts.values()):
        body = ast.parse(inspect.getsource(type(config))).body[0].body
        documented = {
            a.target.id for a, b in itertools.pairwise(body) if isinstance(a, ast.AnnAssign) and isinstance(b, ast.Expr)
        }
        assert {f.name for f in fields(config)} - documented <= parts.keys(), type(config)


ODD = [
    ("deep.yaml", "[" * 1500, "nested"),
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
def test_what_holds_no_names_and_values_is_named(name, content, says, tmp_path, capsys):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=says) as fault:
        read_data(path)
    assert str(path) in str(fault.value)
    if path.suffix == ".yaml":
        assert plan(["--config", str(path)]) == 2
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
def test_a_record_of_attempts_of_other_types_is_named(content, tmp_path):
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
        ("null", "`tile` is empty"),
    ],
)
def test_values_of_the_wrong_type_are_named(value, says, tmp_path, capsys):
    path = tmp_path / "settings.yaml"
    path.write_text(f"tile: {value}\n")
    assert plan(["--config", str(path)]) == 2
    assert says in capsys.readouterr().err
