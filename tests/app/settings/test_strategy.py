"""The settings of a strategy: who started the ranks, what is filled in, and what is taken as it is asked for."""

from typing import get_args

import pytest

from app.settings.launcher import PORTS, expand_counts, find_launch, first_host, slurm_variables, tasks_of_node
from app.settings.strategy import Parallel, StrategySettings
from app.settings.strategy_errors import strategy_errors
from parallel.schedule.registry import SCHEDULES
from parallel.strategy import STALE, WHOLE
from tests.app.settings.test_setting_errors import settings_of

OPENMPI = {"COMM_WORLD_RANK": "1", "COMM_WORLD_SIZE": "4", "COMM_WORLD_LOCAL_RANK": "1", "COMM_WORLD_LOCAL_SIZE": "2"}
LAUNCHERS = {
    "torchrun": {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
    "openmpi": {f"OMPI_{name}": value for name, value in OPENMPI.items()},
    "mpich": {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
    "cray": {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"},
    "slurm": {"PMIX_RANK": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_TASKS_PER_NODE": "2(x2)"},
}
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


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers_are_recognised(launcher, monkeypatch):
    assert find_launch() is None
    for name, value in LAUNCHERS[launcher].items():
        monkeypatch.setenv(name, value)
    launch = find_launch()
    assert (launch.rank, launch.world, launch.local_rank, launch.local_world) == (1, 4, 1, 2)
    assert launch.mpi == (launcher != "torchrun")
    assert StrategySettings(ranks=1).world == 4


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_only_process_of_a_launcher_starts_ranks_itself(launcher, monkeypatch):
    for name in LAUNCHERS[launcher]:
        monkeypatch.setenv(name, "1" if any(word in name for word in ("SIZE", "NRANKS", "TASKS")) else "0")
    assert (find_launch(), StrategySettings(ranks=4).world) == (None, 4)


def test_ranks_of_pods_need_their_place_on_the_host(monkeypatch):
    """Each pod once took all ranks for ranks of its host, and divided its cores and memory among them."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"LOCAL_WORLD_SIZE \(got None\).* set LOCAL_RANK=0 LOCAL_WORLD_SIZE=1"):
        find_launch()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert find_launch().local_world == 1


def test_a_slurm_batch_script_is_no_launcher(monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert find_launch() is None


def test_all_tasks_of_a_step_meet_at_one_place_and_other_steps_elsewhere():
    first, last = (
        slurm_variables({**TASK, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}),
        slurm_variables(TASK),
    )
    assert list(last.values())[:-1] == ["4", "5", "1", "2", "gpu09"]
    assert int(last["MASTER_PORT"]) in PORTS
    place = {name: last[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
    assert first | place | {"LOCAL_WORLD_SIZE": "3"} == first
    others = [slurm_variables({**TASK, "SLURM_JOB_ID": str(123456 + k)}) for k in range(1, 300)]
    assert all(
        other["MASTER_PORT"] != first["MASTER_PORT"]
        for other in (*others, slurm_variables({**TASK, "SLURM_STEP_ID": "3"}))
    )


@pytest.mark.parametrize(
    ("changed", "place"),
    [
        ({"MASTER_ADDR": "10.1.1.1", "MASTER_PORT": "29500"}, "10.1.1.1"),  # what the user says goes first
        ({"SLURM_STEP_NODELIST": "gpu09", "SLURM_STEP_TASKS_PER_NODE": "5"}, "127.0.0.1"),  # its name need not be known
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),  # nobody to meet
        *(({name: None}, None) for name in ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")),
    ],
)
def test_where_tasks_meet_and_what_is_no_task(changed, place):
    task = slurm_variables({name: value for name, value in (TASK | changed).items() if value is not None})
    assert (task and task["MASTER_ADDR"]) == place
    assert "MASTER_PORT" not in changed or task["MASTER_PORT"] == "29500"


def test_a_task_is_launched_without_mpi(monkeypatch):
    def launched(**changed):
        for name, value in changed.items():
            monkeypatch.setenv(name, value)
        launch = find_launch()
        return launch.rank, launch.world, launch.local_rank, launch.local_world, launch.mpi

    assert launched(**TASK) == (4, 5, 1, 2, False)
    assert launched(PMI_RANK="4", PMI_SIZE="5") == (4, 5, 1, 2, True)  # srun --mpi=pmi2 says no more of MPI's own
    inside = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), "2")
    assert launched(**inside) == (2, 2, 2, 2, False)  # torchrun inside a task
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert find_launch() is None  # a torchrun of one rank inside a task
    assert launched(MEGATILE_RANK="1", RANK="0") == (0, 1, 2, 2, False)  # --ranks 1, to be started again


def test_hosts_and_counts():
    for hosts, first in (("a[01-03,7],b", "a01"), ("r[1-2]n[09-10]-ib", "r1n09-ib"), ("login,a[1-2]", "login")):
        assert first_host(hosts) == first
    assert list(expand_counts("2(x3),1")) == [2, 2, 2, 1]
    assert tasks_of_node({"SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_NODEID": "1"}) == 4
    assert tasks_of_node({}) is None
    with pytest.raises(ValueError, match=r"Slurm gave 'a\[x-3\]'"):
        first_host("a[x-3]")
    with pytest.raises(ValueError, match=r"Slurm gave '4\(x'"):
        list(expand_counts("4(x"))


def test_every_schedule_can_be_asked_for():
    assert set(get_args(Parallel)) == {"auto", *WHOLE, "spatial", "subgraph", *SCHEDULES, *STALE}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("", ("single", 1, 1, 1)),
        ("ranks=3", ("ddp", 1, 3, 3)),
        ("fsdp ranks=3", ("fsdp", 1, 3, 3)),
        ("ddp ranks=3 zero=3", ("fsdp", 1, 3, 3)),
        ("mp-basic ranks=2", ("mp-basic", 2, 1, 1)),
        ("gpipe ranks=2", ("gpipe", 2, 1, 4)),
        ("gpipe ranks=4 stages=2", ("gpipe", 2, 2, 8)),
        ("1f1b ranks=3 batch=5", ("1f1b", 3, 1, 5)),
        ("mast ranks=8 stages=4", ("mast", 4, 2, 4)),
        ("bidirectional ranks=2 microbatches=3", ("bidirectional", 2, 1, 3)),
        # Minibatches that nobody named are of one size.
        *((f"async ranks={n} batch={b}", ("async", 1, n, m)) for n, b, m in ((1, 8, 4), (2, 8, 8), (2, 24, 8))),
        *((f"async ranks={n} batch={b}", ("async", 1, n, b)) for n, b in ((3, 10), (2, 7))),
        ("spatial ranks=4 grid=2x1", ("spatial", 1, 2, 2)),
        ("ddp ranks=3 device=mixed cpu_ranks=1", ("ddp", 1, 3, 3)),
        ("ddp ranks=3 device=mixed cpu_ranks=1 shares=3,3,1", ("ddp", 1, 3, 7)),
        ("ddp ranks=3 device=mixed cpu_ranks=1 precision=fp32", ("ddp", 1, 3, 3)),
        ("ddp ranks=2 shares=3,1", ("ddp", 1, 2, 4)),
        ("auto gradient_buckets=4MiB", ("single", 1, 1, 1)),
        ("auto ranks=2 gradient_buckets=4MiB", ("ddp", 1, 2, 2)),
        ("ddp ranks=2 gradient_buckets=4MiB", ("ddp", 1, 2, 2)),
        ("master ranks=2 gradient_buckets=4MiB", ("master", 2, 1, 4)),
        ("gpipe ranks=4 stages=2 gradient_buckets=4MiB", ("gpipe", 2, 2, 8)),
    ],
)
def test_what_is_not_asked_for_is_filled_in(asked, expected):
    settings = settings_of(asked)
    assert strategy_errors(settings) == []
    assert (settings.name, settings.depth, settings.groups, settings.m) == expected
    assert settings.computed_precision == ("fp32" if "mixed" in asked else "auto")


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ("spatial ranks=2 grid=2x1", "spatial 1 x 1 of 2x1, m=1"),
        ("spatial ranks=3", "spatial 1 x 1 of 3x1, m=1"),
        ("spatial ranks=40 grid=10x2", "spatial 2 x 1 of 10x2, m=2"),
        ("1f1b ranks=4 grid=2x1", "1f1b 1 x 2 of 2x1, m=4"),
        ("1f1b ranks=8 stages=2 grid=2x1", "1f1b 2 x 2 of 2x1, m=8"),
        ("master ranks=4 grid=2x1", "master 1 x 2 of 2x1, m=4"),
        ("1f1b ranks=4 grid=2x1 stream=16", "1f1b 1 x 2 of 2x1, m=4 +stream 16"),
    ],
)
def test_what_teams_can_do_is_taken_as_it_is_asked_for(asked, shown):
    settings = settings_of(asked)
    assert strategy_errors(settings) == []
    strategy = settings.to_strategy("cpu")
    assert (str(strategy), strategy.mesh.groups) == (shown, settings.groups)


@pytest.mark.parametrize(
    ("device", "given", "ahead"), [("cuda", None, None), ("cpu", None, 0), ("cuda", "3MiB", 3 << 20)]
)
def test_the_window_of_offloading_follows_the_largest_activation_on_a_gpu(device, given, ahead):
    settings = StrategySettings("single", offload="overlap", offload_ahead=given)
    assert settings.to_strategy(device).policy.ahead == ahead


@pytest.mark.parametrize(
    ("asked", "size"), [(None, None), ("0", 0), ("4MiB", 4 << 20), ("1.5KiB", 1536), ("none", None), ("", None)]
)
def test_sizes_of_gradient_buckets(asked, size):
    assert StrategySettings("ddp", ranks=2, gradient_buckets=asked).bucket_bytes == size
