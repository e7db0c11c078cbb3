"""What cannot be kept is used all the same."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from parallel.profile import cache, link_speed
from parallel.profile import calibrate as calibration
from parallel.profile.cache import keep, kept_at, kept_text
from parallel.profile.calibrate import DeviceUse, load_or_calibrate
from parallel.profile.link_speed import CopySpeed, load_or_measure_copies

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
SAID = "what was measured of this machine is used now and not kept; XDG_CACHE_HOME names another folder"


class Measured:
    """A cost model as far as keeping it goes."""

    seconds_taken = 45.0
    others = 0.0

    def to_json(self) -> str:
        return "{}"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    cache._tell.cache_clear()
    monkeypatch.setattr(calibration, "calibrate", lambda *_, **__: Measured())
    monkeypatch.setattr(link_speed, "measure_copies", lambda *_, **__: CopySpeed(1e9, 1e9))


def measure(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is said when both kinds of measurement are made."""
    assert isinstance(load_or_calibrate(DeviceUse(CPU)), Measured)
    assert load_or_measure_copies(CPU) == CopySpeed(1e9, 1e9)
    return [record.getMessage() for record in caplog.records]


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # as for the number of a user that no list knows
    assert kept_at({}) is None
    assert measure(caplog) == [f"this user has no home folder: {SAID}"]


@pytest.mark.parametrize("home", ["/proc/none", "/dev/null"])
def test_a_home_that_cannot_be_written(
    home: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", home)
    (said,) = measure(caplog)
    assert said.startswith(f"{home}/.cache/megatile cannot be written (No")  # such file; a directory
    assert said.endswith(SAID)


def test_a_cache_whose_disk_is_full(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "replace", full)
    assert measure(caplog) == [f"{tmp_path}/megatile cannot be written (No space left on device): {SAID}"]
    assert list((tmp_path / "megatile").iterdir()) == []
    monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    keep(kept_at({}), "text")


COMPILES = """
import os, stat, sys
from dataclasses import dataclass
from app.settings.cli import run_command

@dataclass(frozen=True)
class Command:
    pass

def body(_):
    import torch
    torch.optim.SGD([torch.ones(1, requires_grad=True)])
    import torch._dynamo
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    print(cache_dir(), oct(stat.S_IMODE(os.stat(cache_dir()).st_mode)))

sys.exit(run_command(Command, body, [], "command"))
"""


@pytest.mark.process
@pytest.mark.parametrize("home", ["cache", "none"])
def test_torch_compiles_where_nobody_else_writes(home: str, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    cache_home = {"cache": str(tmp_path / "cache"), "none": "/proc/none"}[home]
    environment = {k: v for k, v in os.environ.items() if k != cache.INDUCTOR}
    environment |= {"XDG_CACHE_HOME": cache_home, "TMPDIR": str(tmp_path / "tmp")}
    done = subprocess.run(
        [sys.executable, "-c", COMPILES], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100
    )
    folder, mode = done.stdout.split()
    assert mode == "0o700"
    expected = tmp_path / "cache" / "megatile" / "torchinductor" if home == "cache" else tmp_path / "tmp"
    assert Path(folder).is_relative_to(expected)
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    "harm",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data[:40],
        lambda data: data.replace(b"4.5", b"9.5"),
        lambda data: data.partition(b"\n")[0],
        lambda data: b"[" * 100_000,
        lambda data: b"\xff\x00" * 50,
        lambda data: b'{"key": {}, "others": "many"}',
    ],
)
def test_what_is_damaged_is_named_and_measured_anew(
    harm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = kept_at({"device": "abacus"})
    assert kept_text(path) is None
    keep(path, '{"seconds": 4.5}')
    assert kept_text(path) == '{"seconds": 4.5}'
    assert not caplog.records
    path.write_bytes(harm(path.read_bytes()))
    assert kept_text(path) is None
    (record,) = caplog.records
    assert str(path) in record.getMessage()
