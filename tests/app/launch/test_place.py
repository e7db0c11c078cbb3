"""What a process finds out and sets before it computes: cores, memory, device, precision, who shares a GPU."""

import os
from types import SimpleNamespace

import pytest
import torch

from app.launch import host
from app.launch import place as module
from app.launch.host import cgroup_limits, memory_bytes, memory_kills, usable_cores
from app.launch.place import (
    RankPlacement,
    agree_on_precision,
    autocast_of,
    choose_device,
    device_of,
    host_share,
    place,
    rank_cores,
)
from app.settings.launcher import Launch, find_launch
from app.settings.strategy import StrategySettings
from parallel.comm import torch_comm
from parallel.comm.communicator import CommunicationError
from parallel.comm.kinds import RankKind
from parallel.comm.thread_comm import run_on_threads

MIXED = StrategySettings("ddp", device="mixed", cpu_ranks=1, ranks=3)


def test_denormal_numbers_are_zero_on_a_cpu():
    tiny = torch.full((1000,), 1e-39)
    assert (tiny * 0.5).any()
    place(StrategySettings("single", device="cpu"))
    assert not (tiny * 0.5).any()


def be_rank(monkeypatch, local_rank, ranks, cores=16):
    """One of ``ranks`` of a machine, the second of two."""
    numbers = {"RANK": ranks + local_rank, "WORLD_SIZE": 2 * ranks, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": ranks}
    for name, value in (numbers | {"CUDA_DEVICE_MAX_CONNECTIONS": module.HARDWARE_QUEUES}).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(module, "usable_cores", lambda: cores)


@pytest.mark.parametrize(
    ("ranks", "cpu_ranks", "cores", "expected"),
    [
        (3, 0, 16, [5, 5, 5]),
        (3, 1, 16, [2, 2, 12]),
        (4, 2, 16, [2, 2, 6, 6]),
        (2, 1, 2, [1, 1]),
        (3, 1, 2, [1, 1, 1]),
        (5, 1, 8, [1, 1, 1, 1, 4]),
    ],
)
def test_ranks_on_the_cpu_have_the_cores_that_others_leave(ranks, cpu_ranks, cores, expected, monkeypatch):
    found = []
    for local_rank in range(ranks):
        be_rank(monkeypatch, local_rank, ranks, cores)
        found.append(rank_cores(cpu_ranks))
    assert found == expected


@pytest.mark.parametrize(
    ("own", "cpu_ranks", "expected"), [(16, 0, [4, 4, 4, 4]), (4, 0, [4, 4, 4, 4]), (4, 1, [2, 2, 2, 4])]
)
def test_ranks_that_srun_binds_have_cores_of_their_own(own, cpu_ranks, expected, monkeypatch):
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "16")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(own))
    found = []
    for local_rank in range(4):
        be_rank(monkeypatch, local_rank, 4, own)
        found.append(rank_cores(cpu_ranks))
    assert found == expected
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # ranks of torchrun share what one task is bound to
    assert rank_cores() == own // 4


@pytest.mark.parametrize(
    ("world", "asked", "own", "expected"),
    [(2, "auto", None, "32"), (2, "auto", "12", "12"), (2, "cpu", None, None), (1, "auto", None, None)],
)
def test_hardware_queues_are_set_before_cuda_starts(world, asked, own, expected, monkeypatch):
    """And not where the user has set them."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    environ = {"RANK": "0", "WORLD_SIZE": str(world), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(world)}
    monkeypatch.setattr(os, "environ", environ | ({name: own} if own else {}))
    found = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found.append(os.environ.get(name)))
    assert choose_device(asked).type == "cpu"
    assert (found or [os.environ.get(name)]) == [expected]


def test_ranks_of_a_machine_share_half_of_its_free_memory(monkeypatch):
    monkeypatch.setattr(module, "memory_bytes", lambda: (1000, 600))
    be_rank(monkeypatch, 1, 3)
    assert host_share() == 100


def refusal(monkeypatch, settings, ranks):
    """The message of the first rank of a machine, once all its ranks have refused ``settings``."""
    monkeypatch.setattr(module.time, "sleep", lambda _: None)
    for local_rank in range(1, ranks):
        be_rank(monkeypatch, local_rank, ranks)
        with pytest.raises(SystemExit, match="2"):
            place(settings)
    be_rank(monkeypatch, 0, ranks)
    with pytest.raises(ValueError, match="--") as refused:
        place(settings)
    return str(refused.value)


def test_a_mixed_run_without_a_gpu_is_refused_on_every_rank(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = refusal(monkeypatch, MIXED, 3)
    assert "--device mixed: no usable GPU was found" in said
    assert "or use --device cpu" in said


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs, by number: their compute capabilities, and a torch with kernels for 7.5 and 8.0. Afterwards TF32 is as
    it was."""
    capabilities = {0: (8, 6), 1: (8, 0)}
    index = lambda device: device if isinstance(device, int) else device.index  # noqa: E731
    for name, fake in {
        "is_available": lambda: True,
        "device_count": lambda: len(capabilities),
        "set_device": lambda _: None,
        "get_arch_list": lambda: ["sm_75", "sm_80"],
        "get_device_capability": lambda device: capabilities[index(device)],
        "get_device_name": lambda device: "Tesla V100-SXM2-16GB",
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    yield capabilities
    matmul.allow_tf32, cudnn.allow_tf32 = before


def test_the_last_ranks_of_a_machine_are_on_its_cpu(gpus, monkeypatch):
    found = []
    for local_rank in (2, 0, 1):
        be_rank(monkeypatch, local_rank, 3)
        found.append(str(device_of(MIXED)))
    assert found == ["cpu", "cuda:0", "cuda:1"]
    assert MIXED.computed_precision == "fp32"


def test_a_gpu_without_kernels_is_not_chosen(gpus, monkeypatch, caplog):
    """All ranks of a machine then compute on its CPU, and the first warns; a GPU that no rank uses does not matter."""
    gpus[1] = (7, 0)
    be_rank(monkeypatch, 0, 1)
    assert str(choose_device("auto")) == "cuda:0"
    for local_rank in (0, 1):
        be_rank(monkeypatch, local_rank, 2)
        assert str(choose_device("auto")) == "cpu"
    (warning,) = caplog.messages
    said = refusal(monkeypatch, StrategySettings("ddp", device="cuda", ranks=2), 2)
    for message in (warning, said):
        assert "GPU 1 (Tesla V100-SXM2-16GB" in message
        assert "cu126" in message
    assert str(choose_device("cpu")) == "cpu"


GPU, CPU = RankKind("a", "cuda", "GPU-0"), RankKind("a", "cpu")


def test_ranks_on_gpus_share_none():
    def joined(inner, _):
        return module._mixed(inner, [GPU, GPU, CPU], MIXED, torch.device("cpu"))

    with pytest.raises(CommunicationError, match=r"--device mixed: ranks share a GPU, .*more of them on its CPU"):
        run_on_threads(3, joined)


@pytest.mark.parametrize(
    ("rank", "units", "seen", "said"),
    [
        (0, "0012", 3, "ranks 0 and 1 share GPU 0 of a: NCCL is off"),
        (1, "0012", 1, ""),
        (0, "0123", 4, ""),
        (0, "0123", 1, "ranks see 1 of the 4 GPUs of their machine"),
    ],
)
def test_gpus_that_ranks_share_or_do_not_see_are_told_once(rank, units, seen, said, monkeypatch, caplog):
    be_rank(monkeypatch, rank, 4)
    joined = SimpleNamespace(rank=rank, kinds=[RankKind("a boot", "cuda", unit) for unit in units])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setattr(torch_comm, "TorchCommunicator", lambda *_: joined)
    settings = StrategySettings("ddp", ranks=4)
    launch = find_launch()
    assert module._join(settings, torch.device("cuda", 0), launch) is joined
    assert [record.getMessage()[: len(said)] for record in caplog.records] == [said] * bool(said)


def test_a_host_without_a_gpu_is_named_where_others_have_one(monkeypatch):
    """Under ``--device auto`` it trained in fp32 on its CPU, and the others waited for it."""
    be_rank(monkeypatch, 0, 2)
    kinds = [RankKind(host, "cuda", unit) for host in ("a boot", "c boot") for unit in "01"]
    kinds[2:2] = [RankKind("b boot", "cpu")] * 2
    joined = SimpleNamespace(rank=0, kinds=kinds)
    monkeypatch.setattr(torch_comm, "TorchCommunicator", lambda *_: joined)
    settings, launch = StrategySettings("ddp", ranks=6), find_launch()
    with pytest.raises(CommunicationError, match=r"no usable GPU was found on b \(ranks 2, 3\), .*--device cpu"):
        module._join(settings, torch.device("cuda", 0), launch)


def test_one_rank_of_a_host_warns_that_mpirun_may_bind_them(monkeypatch, caplog):
    def start_mpi(*_):
        raise CommunicationError("not here")

    monkeypatch.setattr(module, "kill_after", start_mpi)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.delenv("SLURM_CPUS_ON_NODE", raising=False)
    for rank in range(2):
        with pytest.raises(CommunicationError):
            module._join(StrategySettings("ddp"), torch.device("cpu"), Launch(rank, 2, rank, 2, mpi=True))
    (warning,) = caplog.messages
    assert "divide 4 of its 16 cores: if Open MPI binds them, start mpirun with --bind-to none" in warning


@pytest.mark.parametrize("asked", [None, "host", "device"])
def test_sums_go_the_way_that_is_asked_for(asked):
    settings = StrategySettings("ddp", device="mixed", cpu_ranks=1, ranks=2, mixed_sums=asked)

    def summed(inner, _):
        communicator = module._mixed(inner, [GPU, CPU], settings, torch.device("cpu"))
        tensor = torch.tensor(inner.rank + 1.0)
        communicator.all_reduce(tensor)
        return communicator.way, tensor.item()

    assert run_on_threads(2, summed) == [(asked or "device", 3.0)] * 2


@pytest.mark.parametrize(
    ("asked", "capability", "decided"),
    [
        ("auto", (8, 0), "bf16"),
        ("auto", (7, 0), "fp32"),  # V100 and T4 emulate bf16, at a fraction of the speed of float32
        ("auto", (7, 5), "fp32"),
        ("auto", None, "fp32"),
        ("fp32", (8, 0), "fp32"),
        ("tf32", (8, 0), "tf32"),
        ("bf16", (7, 0), "bf16"),
        ("bf16", None, "bf16"),
    ],
)
def test_tf32_is_on_with_tf32_alone(asked, capability, decided, gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_arch_list", list)
    gpus[0] = capability or (8, 0)
    torch.backends.cudnn.allow_tf32 = True  # torch's default
    found = place(StrategySettings("single", device="cuda" if capability else "cpu", precision=asked))
    assert found.precision == decided
    assert autocast_of(found.precision) == (torch.bfloat16 if decided == "bf16" else None)
    assert torch.backends.cudnn.allow_tf32 == torch.backends.cuda.matmul.allow_tf32 == (decided == "tf32")


@pytest.mark.parametrize(
    ("asked", "own", "decided"),
    [("auto", ("bf16", "fp32"), "fp32"), ("auto", ("bf16", "bf16"), "bf16"), ("bf16", ("bf16", "bf16"), "bf16")],
)
def test_ranks_on_unlike_gpus_compute_alike(asked, own, decided):
    def agreed(communicator, _):
        placement = RankPlacement(communicator, torch.device("cpu"), own[communicator.rank])
        return agree_on_precision(placement, asked).precision

    assert run_on_threads(2, agreed) == [decided] * 2


@pytest.mark.parametrize(("device", "named"), [("cpu", "a CPU"), ("cuda", "Tesla V100")])
def test_tf32_is_refused_where_there_is_none(device, named, gpus, monkeypatch):
    gpus.update({0: (7, 5), 1: (7, 5)})
    said = refusal(monkeypatch, StrategySettings("ddp", device=device, precision="tf32", ranks=2), 2)
    assert f"--precision tf32 needs a GPU of compute capability 8.0 or more; got {named}" in said


@pytest.fixture
def write_groups(tmp_path, monkeypatch):
    """Makes files of control groups: folder -> file name, dots as ``__``, and its text; the kernel's are not seen."""
    for name, path in {"CGROUPS": "cgroup", "OWN_CGROUP": "own", "VMSTAT": "vmstat"}.items():
        monkeypatch.setattr(host, name, tmp_path / path)

    def write(groups, own):
        for folder, files in groups.items():
            (tmp_path / "cgroup" / folder).mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (tmp_path / "cgroup" / folder / name.replace("__", ".")).write_text(text + "\n")
        if own:
            (tmp_path / "own").write_text(own + "\n")

    return write


TREE = {
    "slurm": {"memory__max": "8000", "memory__current": "1000", "cpu__max": "250000 100000"},
    "slurm/job": {"memory__max": "max", "memory__current": "900", "cpu__max": "max 100000"},
}
FULLER = {
    "slurm": {"memory__max": "8000", "memory__current": "1000"},
    "slurm/job": {"memory__max": "9000", "memory__current": "8900", "memory__stat": "anon 1\ninactive_file 6000"},
}
CONTAINER = {
    "memory": {"memory__limit_in_bytes": "4096", "memory__usage_in_bytes": "96"},
    "cpu": {"cpu__cfs_quota_us": "150000", "cpu__cfs_period_us": "100000"},
}
UNLIMITED = {
    "memory": {"memory__limit_in_bytes": "9223372036854771712"},
    "cpu": {"cpu__cfs_quota_us": "-1", "cpu__cfs_period_us": "100000"},
}


@pytest.mark.parametrize(
    ("groups", "own", "cores", "limit", "free"),
    [
        (TREE, "0::/slurm/job", 2.5, 8000, 7000),  # the least limit on the way up
        (FULLER, "0::/slurm/job", None, 8000, 6100),  # files that were read can be dropped
        (CONTAINER, "4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n0::/", 1.5, 4096, 4000),  # sees only the mount
        (UNLIMITED, "4:memory:/\n1:cpu:/", None, None, None),
        ({}, None, None, None, None),
    ],
    ids=["version 2", "fuller below", "version 1", "no limit", "no group"],
)
def test_limits_of_control_groups(groups, own, cores, limit, free, write_groups):
    write_groups(groups, own)
    assert cgroup_limits() == (cores, limit, free)


KILLS = {"slurm/job": {"memory__events": "low 0\noom 4\noom_kill 3"}, "slurm": {"memory__events": "oom_kill 7"}}
KILLS |= {"memory/job": {"memory__oom_control": "oom_kill_disable 0\noom_kill 2"}}


@pytest.mark.parametrize(
    ("own", "machine", "count"),
    [("0::/slurm/job", "40", 3), ("4:memory:/job\n0::/", "40", 2), ("", "40", 40), ("", None, None)],
)
def test_kills_for_lack_of_memory_are_those_of_the_own_group_or_of_the_machine(
    own, machine, count, write_groups, tmp_path
):
    write_groups(KILLS if own else {}, own)
    if machine:
        (tmp_path / "vmstat").write_text(f"nr_free_pages 12\noom_kill {machine}\n")
    assert memory_kills() == count


def test_this_machine():
    total, free = memory_bytes()
    assert 0 < free <= total
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
