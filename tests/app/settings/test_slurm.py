"""What Slurm's variables say of a process: a task of a step, a batch script, the shell of salloc."""

from __future__ import annotations

import pytest

from app.settings.launcher import PORTS, expand_counts, find_launch, find_task, first_host, tasks_of_node

TASK = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "3,2",
    "SLURM_STEP_NODELIST": "gpu[09-10]",
}


def test_a_task_of_srun() -> None:
    task = find_task(TASK)
    assert task is not None
    assert (task.rank, task.world, task.local_rank, task.local_world, task.host) == (4, 5, 1, 2, "gpu09")
    assert task.port in PORTS
    assert task.variables["MASTER_PORT"] == str(task.port)


def test_all_tasks_of_a_step_meet_at_one_place_and_other_steps_elsewhere() -> None:
    first = find_task({**TASK, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    last = find_task(TASK)
    assert first is not None
    assert last is not None
    assert (first.host, first.port) == (last.host, last.port)
    assert (first.local_world, last.local_world) == (3, 2)
    others = [find_task({**TASK, "SLURM_JOB_ID": str(123456 + k), "SLURM_STEP_ID": "2"}) for k in range(1, 300)]
    others += [find_task({**TASK, "SLURM_STEP_ID": "3"})]
    assert all(other is not None and other.port != first.port for other in others)


def test_what_the_user_says_of_the_place_goes_first() -> None:
    task = find_task({**TASK, "MASTER_ADDR": "10.1.1.1", "MASTER_PORT": "29500"})
    assert task is not None
    assert (task.host, task.port) == ("10.1.1.1", 29500)


def test_on_one_node_its_name_need_not_be_known() -> None:
    task = find_task({**TASK, "SLURM_STEP_NODELIST": "gpu09", "SLURM_STEP_TASKS_PER_NODE": "5"})
    assert task is not None
    assert task.host == "127.0.0.1"


@pytest.mark.parametrize("left_out", ["SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"])
def test_batch_scripts_and_shells_are_no_tasks(left_out: str) -> None:
    assert find_task({key: value for key, value in TASK.items() if key != left_out}) is None


def test_a_step_of_one_task_has_nobody_to_meet() -> None:
    assert find_task({**TASK, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None


def test_a_task_is_launched_without_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TASK.items():
        monkeypatch.setenv(name, value)
    launch = find_launch()
    assert launch is not None
    assert (launch.rank, launch.world, launch.local_rank, launch.local_world, launch.mpi) == (4, 5, 1, 2, False)
    monkeypatch.setenv("PMI_RANK", "4")  # srun --mpi=pmi2 says no more than these two of MPI's own
    monkeypatch.setenv("PMI_SIZE", "5")
    launch = find_launch()
    assert launch is not None
    assert (launch.rank, launch.world, launch.local_rank, launch.local_world, launch.mpi) == (4, 5, 1, 2, True)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):  # torchrun inside a task
        monkeypatch.setenv(name, "2")
    launch = find_launch()
    assert launch is not None
    assert (launch.rank, launch.world, launch.mpi) == (2, 2, False)


def test_hosts_and_counts() -> None:
    assert first_host("a[01-03,7],b") == "a01"
    assert first_host("r[1-2]n[09-10]-ib") == "r1n09-ib"
    assert first_host("login,a[1-2]") == first_host("login") == "login"
    assert list(expand_counts("2(x3),1")) == [2, 2, 2, 1]
    assert tasks_of_node({"SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_NODEID": "1"}) == 4
    assert tasks_of_node({}) is None
    with pytest.raises(ValueError, match=r"Slurm gave 'a\[x-3\]'"):
        first_host("a[x-3]")
    with pytest.raises(ValueError, match=r"Slurm gave '4\(x'"):
        list(expand_counts("4(x"))
