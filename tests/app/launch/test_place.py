"""What a process does before it computes anything."""

from __future__ import annotations

import pytest
import torch

from app.launch import place as module
from app.launch.place import choose_autocast, choose_device, device_of, place, rank_cores
from app.settings.strategy import StrategySettings
from parallel.comm.communicator import CommunicationError, Communicator
from parallel.comm.kinds import RankKind
from parallel.comm.mixed_comm import MixedCommunicator
from parallel.comm.thread_comm import run_on_threads

MIXED = StrategySettings("ddp", device="mixed", cpu_ranks=1, ranks=3)


def test_denormal_numbers_are_zero_on_a_cpu() -> None:
    tiny = torch.full((1000,), 1e-39)
    assert (tiny * 0.5).any()
    place(StrategySettings("single", device="cpu"))
    assert not (tiny * 0.5).any()


def be_rank(monkeypatch: pytest.MonkeyPatch, local_rank: int, ranks: int, cores: int = 16) -> None:
    """One of ``ranks`` of a machine, the second of two."""
    numbers = {"RANK": ranks + local_rank, "WORLD_SIZE": 2 * ranks, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": ranks}
    for name, value in numbers.items():
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
def test_ranks_on_the_cpu_have_the_cores_that_others_leave(
    ranks: int, cpu_ranks: int, cores: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for local_rank in range(ranks):
        be_rank(monkeypatch, local_rank, ranks, cores)
        found.append(rank_cores(cpu_ranks))
    assert found == expected


@pytest.mark.parametrize(
    ("world", "asked", "expected"),
    [
        (2, "auto", {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "12"}),
        (2, "cpu", {"CUDA_DEVICE_MAX_CONNECTIONS": "12"}),
        (1, "auto", {"CUDA_DEVICE_MAX_CONNECTIONS": "12"}),
    ],
)
def test_variables_of_cuda_are_set_before_it_starts(
    world: int, asked: str, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not where the user has set them."""
    environ = {"RANK": "0", "WORLD_SIZE": str(world), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(world)}
    monkeypatch.setattr(module.os, "environ", environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "12"})
    found = dict[str, str]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found.update(module.os.environ) or False)
    assert choose_device(asked, 0).type == "cpu"
    found = found or dict(module.os.environ)
    assert {name: value for name, value in found.items() if name.startswith("CUDA_")} == expected


def test_a_mixed_run_without_a_gpu_is_refused_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for local_rank in range(3):
        be_rank(monkeypatch, local_rank, 3)
        with pytest.raises(ValueError, match=r"--device mixed: no usable GPU was found; .* or use --device cpu"):
            place(MIXED)


def test_the_last_ranks_of_a_machine_are_on_its_cpu_and_none_rounds_to_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = True
    found = []
    try:
        for local_rank in (2, 0, 1):
            be_rank(monkeypatch, local_rank, 3)
            found.append(str(device_of(MIXED)))
            assert torch.backends.cudnn.allow_tf32 == (local_rank == 2)  # the ranks on GPUs come after it
        assert not torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cudnn.allow_tf32 = before
    assert found == ["cpu", "cuda:0", "cuda:1"]
    assert MIXED.computed_precision == "fp32"


GPU, CPU = RankKind("a", "cuda", "GPU-0"), RankKind("a", "cpu")


def test_ranks_on_gpus_share_none() -> None:
    def joined(inner: Communicator, _: object) -> Communicator:
        return module._mixed(inner, [GPU, GPU, CPU], MIXED, torch.device("cpu"))

    with pytest.raises(CommunicationError, match=r"--device mixed: ranks share a GPU, .*more of them on its CPU"):
        run_on_threads(3, joined)


@pytest.mark.parametrize("asked", [None, "host", "device"])
def test_sums_go_the_way_that_is_asked_for(asked: str | None) -> None:
    settings = StrategySettings("ddp", device="mixed", cpu_ranks=1, ranks=2, mixed_sums=asked)  # type: ignore[arg-type]

    def summed(inner: Communicator, _: object) -> tuple[str, float]:
        communicator = module._mixed(inner, [GPU, CPU], settings, torch.device("cpu"))
        assert isinstance(communicator, MixedCommunicator)
        tensor = torch.tensor(inner.rank + 1.0)
        communicator.all_reduce(tensor)
        return communicator.way, tensor.item()

    assert run_on_threads(2, summed) == [(asked or "device", 3.0)] * 2


@pytest.mark.parametrize("emulated", [False, True])
def test_bf16_that_a_gpu_only_emulates_is_not_chosen(emulated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """V100 and T4 say that they support it, at a fraction of the speed of float32."""
    supported = lambda including_emulation=True: including_emulation or not emulated  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert choose_autocast("auto", torch.device("cuda")) == (None if emulated else torch.bfloat16)
    assert choose_autocast("auto", torch.device("cpu")) is None
    assert choose_autocast("bf16", torch.device("cuda")) == torch.bfloat16
