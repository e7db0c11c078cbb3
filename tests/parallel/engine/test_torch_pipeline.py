"""Torch's own pipelines behind our seam give what the plain step gives, and say clearly what they cannot carry.

Ranks are processes over Gloo, started once for all checks: importing torch is what a start costs.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from models.unet import UNet
from parallel.build import assemble, assemble_torch_pipeline
from parallel.comm.communicator import Communicator, PipelinePart
from parallel.comm.local import LocalCommunicator
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.data_parallel import DataParallelEngine
from parallel.engine.engine import EngineFault
from parallel.engine.step import Microbatch, NonFiniteLoss
from parallel.engine.torch_crossings import Crossing, crossings, forms_of, is_channels_last
from parallel.engine.torch_pipeline import TorchPipelineEngine
from parallel.graph.partition import partition_at
from parallel.stage.stage import Loss
from parallel.strategy import Strategy
from parallel.trace.trace import trace
from tests.helpers.engine_runs import train
from tests.helpers.plain_step import TOLERANCE, Batch, PlainRun, largest_error, plain_run
from tests.helpers.ranks import run_on_ranks
from tests.helpers.small_nets import SkipNet, TwoOutputs, batch_of, pixel_loss, two_losses

RANKS, PX, SEED, LR, STEPS = 2, 16, 11, 0.05, 3
CPU = torch.device("cpu")
SGD = functools.partial(torch.optim.SGD, lr=LR, momentum=0.9, weight_decay=1e-3)
NOTHING = PipelinePart(lambda i, values: values, lambda i: contextlib.nullcontext(), [], [])


class Case(NamedTuple):
    """A model, the schedule that trains it over 2 stages, and how."""

    make: Callable[[], nn.Module]
    loss: Loss
    schedule: str
    m: int
    cuts: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float64
    channels_last: bool = False


class ImagesAgain(nn.Module):
    """The second half uses the images too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.second = nn.Conv2d(7, 3, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.second(torch.cat([torch.tanh(self.first(images)), images], 1))
        return logits


CASES = {
    # Two skips and dropout on either side of the cut.
    "skips": Case(SkipNet, pixel_loss, "1f1b", 4),
    # A dict as output, and a parameter that the loss never reaches.
    "two-outputs": Case(TwoOutputs, two_losses, "gpipe", 3),
    "unet": Case(functools.partial(UNet, classes=3, base=2), pixel_loss, "gpipe", 2),
    "unet-channels-last": Case(functools.partial(UNet, classes=3, base=2), pixel_loss, "1f1b", 3, channels_last=True),
    # The images cross, without a gradient.
    "images-again": Case(ImagesAgain, pixel_loss, "1f1b", 2, ("cat",)),
    "float32": Case(SkipNet, pixel_loss, "1f1b", 2, dtype=torch.float32),
}


def fresh(case: Case) -> nn.Module:
    torch.manual_seed(7)
    layout = torch.channels_last if case.channels_last else torch.contiguous_format
    return case.make().to(case.dtype).to(memory_format=layout)


def batches(case: Case) -> list[Batch]:
    return [batch_of([2] * case.m, PX, step, case.dtype) for step in range(STEPS)]


def engine_of(
    case: Case, communicator: Communicator, *, module: nn.Module | None = None, stages: int = RANKS
) -> TorchPipelineEngine:
    return assemble_torch_pipeline(
        module or fresh(case),
        case.loss,
        SGD,
        communicator,
        Strategy(case.schedule, stages, stages, case.m, cuts=case.cuts),
        shape=(2, 3, PX, PX),
        batch=2 * case.m,
        device=CPU,
        seed=SEED,
    )


# On the ranks


def checks(communicator: Communicator, plain: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {name: trained(communicator, CASES[name]) for name in CASES}
    return found | {
        "resumed": resumed(communicator, CASES["two-outputs"], plain),
        "nan": nan_step(communicator, CASES["skips"]),
        "shape": other_shape(communicator, CASES["skips"]),
        "failed": {where: failing(communicator, where) for where in ("forward", "backward")},
        "shared GPU": shared_gpu(communicator),
    }


def trained(communicator: Communicator, case: Case) -> dict[str, Any]:
    engine = engine_of(case, communicator)
    steps = batches(case)
    losses = train(engine, steps)
    gradients = {name: gradient.clone() for name, gradient in engine.gradients().items()}
    images = steps[0][0][0][:1]  # predictions may come in any size
    predicted = engine.predict(Microbatch(images if engine.predict_wants.images else None, None, tuple(images.shape)))
    state = engine.state_dict()
    spans = [(str(span.action), span.start_s, span.end_s) for span in engine.spans()]
    sent, on_device = dict(engine.bytes_sent), sum(tensor.nbytes for tensor in engine.on_device())
    engine.close()
    return {
        "losses": losses,
        "gradients": gradients,
        "predicted": predicted,
        "model": state.get("model", {}),
        "optimizer": state.get("optimizer", {}),
        "spans": spans,
        "sent": sent,
        "bytes": on_device,
    }


def resumed(communicator: Communicator, case: Case, plain: dict[str, Any]) -> dict[str, Any]:
    """The last step, from what a plain run left before it."""
    engine = engine_of(case, communicator, module=nn.Module.to(case.make(), case.dtype))
    engine.load_state_dict(plain)
    losses = train(engine, batches(case)[-1:], STEPS - 1)
    return {"losses": losses, "state": engine.state_dict()}


def nan_step(communicator: Communicator, case: Case) -> list[int]:
    """One microbatch holds a NaN; both ranks refuse, and what they hold is as before."""
    engine = engine_of(case, communicator)
    steps = batches(case)[:1]
    before = [parameter.detach().clone() for parameter in engine._work.stages[communicator.rank].module.parameters()]
    healthy = steps[0][2][0].clone()
    steps[0][2][0][0, 0, 0, 0] = math.nan
    with pytest.raises(NonFiniteLoss) as caught:
        train(engine, steps)
    for old, new in zip(before, engine._work.stages[communicator.rank].module.parameters(), strict=True):
        assert torch.equal(old, new)
    steps[0][2][0].copy_(healthy)
    train(engine, steps)
    return caught.value.microbatches


def other_shape(communicator: Communicator, case: Case) -> str:
    engine = engine_of(case, communicator)
    with pytest.raises(ValueError, match="microbatches of one shape") as caught:
        train(engine, [batch_of([2] * case.m, PX + 4, 0, case.dtype)])
    train(engine, batches(case)[:1])
    return str(caught.value)


def shared_gpu(communicator: Communicator) -> str:
    """Ranks that talk over Gloo for want of a GPU each."""
    with pytest.raises(ValueError, match="NCCL") as caught:
        communicator.pipeline("gpipe", NOTHING, 2, torch.device("cuda"))
    return str(caught.value)


def fails_in(where: str) -> nn.Module:
    """A model that raises in a forward pass, or in a backward pass."""

    def fail(*_: Any) -> None:
        raise KeyError("no such stain")

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if type(output) is Tensor:  # not while it is traced
            fail() if where == "forward" else output.register_hook(fail)

    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1))
    model[1].register_forward_hook(hook)
    return model


def failing(communicator: Communicator, where: str) -> str:
    """A pipeline of this rank alone, as one that lost another would have to wait."""
    alone = [communicator.subgroup([rank]) for rank in range(RANKS)][communicator.rank]
    assert alone is not None
    case = Case(functools.partial(fails_in, where), pixel_loss, "gpipe", 2)
    with pytest.raises(EngineFault) as caught:
        train(engine_of(case, alone, stages=1), batches(case)[:1])
    return str(caught.value)


# Here


@functools.cache
def plain(name: str, steps: int = STEPS) -> PlainRun:
    case = CASES[name]
    return plain_run(fresh(case), case.loss, SGD, batches(case)[:steps], seed=SEED, lr=LR)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    before = plain("two-outputs", STEPS - 1)
    state = {"model": before.model, "optimizer": before.optimizer}
    checks = "tests.parallel.engine.test_torch_pipeline:checks"
    return run_on_ranks(RANKS, checks, tmp_path_factory.mktemp("ranks"), state)


@pytest.mark.process
@pytest.mark.parametrize("name", CASES)
def test_ranks_equal_the_plain_step(ranks: list[dict[str, Any]], name: str) -> None:
    expected, tolerance = plain(name), TOLERANCE[CASES[name].dtype]
    found: dict[str, Tensor] = {}
    for rank in ranks:
        assert rank[name]["losses"] == pytest.approx(expected.losses, rel=tolerance)
        assert not found.keys() & rank[name]["gradients"].keys()
        assert rank[name]["gradients"]
        found |= rank[name]["gradients"]
    assert found.keys() == expected.gradients.keys()
    assert largest_error(expected.gradients, found) <= 10 * tolerance
    first = ranks[0][name]
    assert list(first["model"]) == list(expected.model)
    assert largest_error(expected.model, first["model"]) <= 10 * tolerance
    assert first["optimizer"]["param_groups"] == expected.optimizer["param_groups"]
    assert first["optimizer"]["state"].keys() == expected.optimizer["state"].keys()
    momenta = [values["momentum_buffer"] for values in expected.optimizer["state"].values()]
    held = [*expected.model.values(), *expected.gradients.values(), *momenta]
    assert sum(rank[name]["bytes"] for rank in ranks) == sum(tensor.nbytes for tensor in held)
    (predicted,) = [rank[name]["predicted"] for rank in ranks if rank[name]["predicted"] is not None]
    assert_predicted(predicted, case=CASES[name], state=expected.model)


def assert_predicted(predicted: Any, case: Case, state: dict[str, Tensor]) -> None:
    module = fresh(case).eval()
    module.load_state_dict(state)
    with torch.no_grad():
        expected = module(batches(case)[0][0][0][:1])
    for key in expected if isinstance(expected, dict) else [...]:
        assert torch.allclose(predicted[key], expected[key].float(), rtol=1e-4, atol=1e-5)


@pytest.mark.process
@pytest.mark.parametrize("name", ["unet", "unet-channels-last"])
def test_passes_and_messages_are_those_of_our_own_schedule(ranks: list[dict[str, Any]], name: str) -> None:
    case = CASES[name]
    strategy = Strategy(case.schedule, RANKS, RANKS, case.m)
    module = fresh(case)

    def rank(communicator: Communicator, _: None) -> tuple[list[str], dict[int, int]]:
        ours = assemble(
            copy.deepcopy(module),
            case.loss,
            SGD,
            communicator,
            strategy,
            shape=(2, 3, PX, PX),
            batch=2 * case.m,
            device=CPU,
        )
        train(ours, batches(case))
        return [str(span.action) for span in ours.spans()], dict(ours.bytes_sent)

    for theirs, (actions, sent) in zip(ranks, run_on_threads(RANKS, rank), strict=True):
        assert [action for action, *_ in theirs[name]["spans"]] == actions
        moments = [moment for _, *span in theirs[name]["spans"] for moment in span]
        assert moments == sorted(moments)
        assert theirs[name]["sent"] == sent


@pytest.mark.process
def test_a_run_of_one_process_goes_on_and_back(ranks: list[dict[str, Any]]) -> None:
    case, expected = CASES["two-outputs"], plain("two-outputs")
    assert [rank["resumed"]["losses"] for rank in ranks] == [pytest.approx(expected.losses[-1:], rel=1e-10)] * RANKS
    state = ranks[0]["resumed"]["state"]
    assert largest_error(expected.model, state["model"]) <= 1e-9
    module = fresh(case)
    back = DataParallelEngine(module, case.loss, SGD(module.parameters()), LocalCommunicator(), batch=6, m=3, seed=SEED)
    back.load_state_dict(state)
    assert largest_error(expected.model, back.state_dict()["model"]) <= 1e-9


@pytest.mark.process
def test_nan_in_one_microbatch_stops_all_before_the_update(ranks: list[dict[str, Any]]) -> None:
    assert [rank["nan"] for rank in ranks] == [[2], [2]]


@pytest.mark.process
def test_another_shape_is_refused_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "here (2, 3, 16, 16); got (2, 3, 20, 20) as microbatch 0 of a step: cut the batch" in rank["shape"]


@pytest.mark.process
@pytest.mark.parametrize(("where", "action"), [("forward", "0F0"), ("backward", "0B0")])
def test_what_fails_in_a_pass_is_shown_in_the_schedule(ranks: list[dict[str, Any]], where: str, action: str) -> None:
    for rank in ranks:
        assert f"failed (KeyError: 'no such stain') at step 1 in {action}: {where} pass" in rank["failed"][where]


def three_stages(make: Callable[[], nn.Module], *cuts: str) -> list[list[Crossing]]:
    torch.manual_seed(0)
    traced = trace(make(), (2, 3, PX, PX))
    partition = partition_at(traced.graph, cuts)
    return crossings(partition, forms_of(traced, (2, 3, PX, PX), CPU, None), channels_last=False)


def test_skips_past_a_stage_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="send tensors alone, and from each stage to the next alone") as caught:
        three_stages(SkipNet, "down2", "up2")
    assert "down1_2 from stage 0 to stage 2, past those between" in str(caught.value)
    assert "use --parallel gpipe or 1f1b" in str(caught.value)


def test_values_that_are_no_tensors_are_refused_by_name() -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

        def forward(self, images: Tensor) -> Tensor:
            values = self.first(images)
            side = values.shape[2]
            logits: Tensor = self.second(values) * side
            return logits

    with pytest.raises(ValueError, match="from stage 0 to stage 1, which is not a tensor"):
        three_stages(Sized, "second")


def test_what_crosses_is_known_without_a_pass() -> None:
    (crossing,) = three_stages(lambda: nn.Sequential(nn.Conv2d(3, 5, 3, stride=2), nn.BatchNorm2d(5)), "1")[0]
    assert (crossing.shape, crossing.dtype, crossing.differentiable) == ((2, 5, 7, 7), torch.float32, True)
    images = dataclasses.replace(crossing, channels_last=True)
    value = torch.randn(2, 5, 7, 7).to(memory_format=torch.channels_last)
    sent = images.sent(value)
    assert sent.shape == images.example.shape == (2, 7, 7, 5)
    assert sent.is_contiguous()
    assert sent.data_ptr() == value.data_ptr()
    assert torch.equal(images.received(sent), value)


def test_autocast_decides_what_type_crosses() -> None:
    traced = trace(nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 3, 3)), (2, 3, PX, PX))
    for autocast, dtype in ((None, torch.float32), (torch.bfloat16, torch.bfloat16)):
        form = forms_of(traced, (2, 3, PX, PX), CPU, autocast)["_0"]
        assert form == ((2, 5, 14, 14), dtype)


def test_layout_is_that_of_the_weights() -> None:
    convolution = nn.Conv2d(3, 5, 3)
    assert not is_channels_last(convolution)
    assert is_channels_last(convolution.to(memory_format=torch.channels_last))
    assert not is_channels_last(nn.Conv2d(3, 5, 1))


@pytest.mark.process
def test_ranks_that_are_no_processes_of_torch_are_refused(ranks: list[dict[str, Any]]) -> None:
    assert all("which refuses ranks that share a GPU: use one rank per GPU" in rank["shared GPU"] for rank in ranks)
    with pytest.raises(ValueError, match="got 1 rank: start them with --ranks or torchrun"):
        LocalCommunicator().pipeline("gpipe", NOTHING, 2, CPU)
    with pytest.raises(ValueError, match=r"got ranks that are threads of one process: .* or use --parallel gpipe"):
        run_on_threads(RANKS, lambda communicator, _: communicator.pipeline("gpipe", NOTHING, 2, CPU))
