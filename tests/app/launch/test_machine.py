from __future__ import annotations

import os
from pathlib import Path

from app.launch.host import cgroup_limits, cpu_model, memory_bytes, memory_kills, usable_cores


def group(path: Path, **files: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text + "\n")


def test_version_2_takes_the_least_limit_on_the_way_up(tmp_path):
    root = tmp_path / "cgroup"
    group(root)
    group(root / "slurm", memory__max="8000", memory__current="1000", cpu__max="250000 100000")
    group(root / "slurm" / "job", memory__max="max", memory__current="900", cpu__max="max 100000")
    (tmp_path / "own").write_text("0::/slurm/job\n")
    found = cgroup_limits(root, tmp_path / "own")
    assert (found.cores, found.memory_bytes, found.memory_used_bytes) == (2.5, 8000, 1000)


def test_version_1_inside_a_container_sees_only_the_mount(tmp_path):
    root = tmp_path / "cgroup"
    group(root / "memory", memory__limit_in_bytes="4096", memory__usage_in_bytes="96")
    group(root / "cpu", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
    (tmp_path / "own").write_text("4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n0::/\n")
    found = cgroup_limits(root, tmp_path / "own")
    assert (found.cores, found.memory_bytes, found.memory_used_bytes) == (1.5, 4096, 96)


def test_no_limit_is_none(tmp_path):
    root = tmp_path / "cgroup"
    group(root / "memory", memory__limit_in_bytes="9223372036854771712")
    group(root / "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    (tmp_path / "own").write_text("4:memory:/\n1:cpu:/\n")
    found = cgroup_limits(root, tmp_path / "own")
    assert (found.cores, found.memory_bytes) == (None, None)
    assert cgroup_limits(tmp_path / "nothing", tmp_path / "nothing").memory_bytes is None


def test_kills_for_lack_of_memory_are_those_of_the_own_group(tmp_path):
    root = tmp_path / "cgroup"
    group(root / "slurm" / "job", memory__events="low 0\noom 4\noom_kill 3\noom_group_kill 1")
    group(root / "slurm", memory__events="low 0\noom_kill 7")
    (tmp_path / "own").write_text("0::/slurm/job\n")
    (tmp_path / "vmstat").write_text("nr_free_pages 12\noom_kill 40\n")
    assert memory_kills(root, tmp_path / "own", tmp_path / "vmstat") == 3
    group(root / "memory" / "job", memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 2")
    (tmp_path / "own").write_text("4:memory:/job\n0::/\n")
    assert memory_kills(root, tmp_path / "own", tmp_path / "vmstat") == 2


def test_kills_for_lack_of_memory_of_the_machine_where_no_group_counts(tmp_path):
    (tmp_path / "vmstat").write_text("nr_free_pages 12\noom_kill 40\n")
    assert memory_kills(tmp_path, tmp_path / "own", tmp_path / "vmstat") == 40
    assert memory_kills(tmp_path, tmp_path / "own", tmp_path / "none") is None


def test_this_machine():
    total, free = memory_bytes()
    assert 0 < free <= total
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
    assert cpu_model()
