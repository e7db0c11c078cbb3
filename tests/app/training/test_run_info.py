from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from app.training.run_info import describe_environment, describe_gpus, describe_launcher, find_program

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS", "SLURM_PROCID", "OMPI_COMM_WORLD_SIZE")


def test_environment_is_json_and_tells_versions():
    told = describe_environment()
    assert json.loads(json.dumps(told)) == told
    assert told["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert told["openslide_library"].startswith("4.")
    assert told["python"] == ".".join(map(str, sys.version_info[:3]))
    assert len(told["gpus"]) == torch.cuda.device_count()


def test_gpus_are_described_as_they_are_chosen(monkeypatch):
    for name, fake in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,  # it asks no other process
        "device_count": lambda: 2,
        "get_device_properties": lambda index: SimpleNamespace(
            name="GPU", total_memory=1, major=(8, 7)[index], minor=0
        ),
        "get_device_capability": lambda index: ((8, 0), (7, 0))[index],
        "get_device_name": lambda index: "GPU",
        "get_arch_list": lambda: ["sm_75", "sm_80"],
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    first, second = describe_gpus()["gpus"]
    assert (first["bf16"], first["missing_kernels"]) == (True, "")
    assert (second["bf16"], "cu126" in second["missing_kernels"]) == (False, True)


def test_environment_tells_nothing_of_the_user():
    text = json.dumps(describe_environment())
    assert str(Path.home()) not in text
    assert '"/' not in text  # no value is a path


def test_commit_is_that_of_the_checkout():
    root = Path(__file__).parents[3]
    commit = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert describe_environment()["megatile"]["commit"] == (commit or None)


def test_launcher_is_told_by_its_variables(monkeypatch):
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert describe_launcher()["started_by"] is None
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert describe_launcher()["started_by"] == "slurm"
    monkeypatch.setenv("WORLD_SIZE", "2")  # torchrun inside a Slurm job
    told = describe_launcher()
    assert told["started_by"] == "torchrun"
    assert told["variables"] == {"WORLD_SIZE": "2", "SLURM_NTASKS": "4"}


def test_programs_beside_python_are_found(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_program(Path(sys.executable).name) is not None
    assert find_program("no-such-program") is None


@pytest.mark.process
def test_importing_it_loads_no_torch():
    code = "import sys, app.training.run_info; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
