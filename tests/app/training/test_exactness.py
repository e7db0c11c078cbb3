"""The comparison itself: what counts as an error, and that none is overlooked."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch
from torch import Tensor

from app.training.exactness import FLOOR, ExactnessTrial, PlainTraining, StepOutcome, compare, verify_engine
from app.training.projected_error import ProjectedError
from benchmarks.whole_engine import whole_engine
from parallel.comm.local import LocalCommunicator
from tests.helpers.small_nets import FourierNet
from tests.helpers.tiny_models import classifier

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trial() -> ExactnessTrial:
    torch.manual_seed(0)
    return ExactnessTrial(classifier(3), (2, 1), 48, torch.float64, CPU, steps=2)


@pytest.fixture(scope="module")
def plain(trial: ExactnessTrial) -> StepOutcome:
    return PlainTraining(trial).step(0)


def parameters(trial: ExactnessTrial) -> list[str]:
    return [name for name, _ in trial.module.named_parameters()]


def test_an_engine_on_one_rank_is_exact(trial: ExactnessTrial) -> None:
    errors = verify_engine(
        trial,
        functools.partial(whole_engine, batch=3, m=2, shape=(2, 3, 48, 48), seed=0),
        LocalCommunicator(),
    )
    assert errors is not None
    assert errors.largest == 0.0
    assert set(errors.of_tensors["gradients"]) == set(parameters(trial))
    assert {name.split(".")[-1] for name in errors.of_tensors["statistics"]} == {
        "running_mean",
        "running_var",
        "num_batches_tracked",
    }
    assert set(errors.of_tensors["optimizer"]) == {f"{name}.momentum_buffer" for name in parameters(trial)}


@pytest.mark.parametrize("kind", ["gradients", "parameters", "statistics"])
def test_a_changed_value_is_found_where_it_is(kind: str, trial: ExactnessTrial, plain: StepOutcome) -> None:
    name = "4.running_mean" if kind == "statistics" else "3.weight"
    tensors = plain.gradients if kind == "gradients" else plain.state["model"]
    changed = {key: value.clone() for key, value in tensors.items()}
    changed[name].view(-1)[0] += 0.5 * float(tensors[name].abs().max())
    field = {"gradients": changed} if kind == "gradients" else {"state": {**plain.state, "model": changed}}
    errors = compare(plain, [dataclasses.replace(plain, **field)], parameters(trial))
    assert errors.largest == errors.of_tensors[kind][name] == errors.of_kind(kind) == pytest.approx(0.5)
    assert errors.by_group()[name[0]][kind] == errors.largest
    assert errors.excesses == [(kind, name)]


def test_any_rank_may_be_the_one_that_is_wrong(trial: ExactnessTrial, plain: StepOutcome) -> None:
    wrong = dataclasses.replace(plain, loss=plain.loss * 1.25)
    assert compare(plain, [plain, wrong], parameters(trial)).loss == pytest.approx(0.25)
    half = dict(list(plain.gradients.items())[:2])
    doubled = {name: 2 * value for name, value in half.items()}
    ranks = [dataclasses.replace(plain, gradients=part) for part in (plain.gradients, half, doubled)]
    assert compare(plain, ranks, parameters(trial)).largest == pytest.approx(1.0)


def test_the_larger_error_of_two_steps_counts(trial: ExactnessTrial, plain: StepOutcome) -> None:
    wrong = dataclasses.replace(plain, loss=plain.loss * 1.25)
    right, off = (compare(plain, [found], parameters(trial)) for found in (plain, wrong))
    assert right.joined(off) == off.joined(right)
    assert not right.joined(off).passed
    assert right.joined(right).passed


def test_a_gradient_that_is_missing_or_not_finite_is_an_error(trial: ExactnessTrial, plain: StepOutcome) -> None:
    fewer = {name: value for name, value in plain.gradients.items() if name != "0.weight"}
    missing = compare(plain, [dataclasses.replace(plain, gradients=fewer)], parameters(trial))
    assert missing.of_tensors["gradients"]["0.weight"] == 1.0
    broken = {**plain.gradients, "0.weight": plain.gradients["0.weight"] * torch.nan}
    assert compare(plain, [dataclasses.replace(plain, gradients=broken)], parameters(trial)).largest == math.inf
    extra = {**plain.gradients, "more": torch.ones(2)}
    assert compare(plain, [dataclasses.replace(plain, gradients=extra)], parameters(trial)).largest > 0.1


def test_what_is_rounding_only_is_held_against_the_largest_of_its_kind(
    trial: ExactnessTrial, plain: StepOutcome
) -> None:
    largest = max(float(value.abs().max()) for value in plain.gradients.values())
    noise = torch.full((8,), 1e-15 * largest, dtype=torch.float64)
    with_bias = dataclasses.replace(plain, gradients={**plain.gradients, "0.bias": noise})
    other = dataclasses.replace(plain, gradients={**plain.gradients, "0.bias": -noise})
    assert compare(with_bias, [other], parameters(trial)).largest == pytest.approx(2e-15 / FLOOR)


@pytest.mark.parametrize(
    ("expected", "found", "error"),
    [
        (torch.tensor(7), torch.tensor(8), 1 / 7),
        (torch.tensor(True), torch.tensor(False), 1.0),
        (torch.tensor(0), torch.tensor(3), 1.0),
        (torch.tensor([-torch.inf, 2.0]), torch.tensor([-torch.inf, 2.0]), 0.0),
        (torch.tensor([-torch.inf, 2.0]), torch.tensor([-1.0, 2.0]), math.inf),
        (torch.zeros(2), torch.zeros(3), math.inf),
    ],
)
def test_counters_and_infinite_values_are_compared(
    expected: Tensor, found: Tensor, error: float, trial: ExactnessTrial, plain: StepOutcome
) -> None:
    """Beside running statistics of any size."""
    theirs, ours = (
        dataclasses.replace(plain, state={**plain.state, "model": {**plain.state["model"], "buffer": value}})
        for value in (expected, found)
    )
    assert compare(theirs, [ours], parameters(trial)).largest == pytest.approx(error)


def test_every_output_and_every_target_counts() -> None:
    output = {"out": torch.randn(2, 3), "aux": (torch.randn(2, 4, 5),)}
    targets, projected_error = torch.zeros(2, 6, 5), ProjectedError()
    loss = projected_error(output, targets)
    assert projected_error(output, targets + torch.tensor([0.0, 1.0])[:, None, None]) != loss
    assert projected_error({**output, "aux": (output["aux"][0] * 2,)}, targets) != loss
    halves = [
        projected_error({"out": output["out"][k], "aux": (output["aux"][0][k],)}, targets[k])
        for k in (slice(0, 1), slice(1, 2))
    ]
    assert sum(halves) / 2 == pytest.approx(float(loss))
    own = {**output, "own loss": torch.tensor(3.0)}
    assert projected_error(own, targets) > loss


def test_boxes_of_a_map_add_up_and_every_px_of_it_counts() -> None:
    generator = torch.Generator().manual_seed(0)
    output, targets = (torch.randn(shape, generator=generator).double() for shape in ((2, 3, 6, 5), (2, 6, 5)))
    loss = ProjectedError()
    parts = [(slice(None), slice(0, 4)), (slice(0, 5), slice(4, 5)), (slice(5, 6), slice(4, 5))]
    sums = sum(loss.sums(output[:, :, rows, columns], targets[:, rows, columns]) for rows, columns in parts)
    assert isinstance(sums, torch.Tensor)
    assert float(loss.value(sums, 30)) == pytest.approx(float(loss(output, targets)), rel=1e-12)
    output.requires_grad_()
    (gradient,) = torch.autograd.grad(loss(output, targets), output)
    assert len(gradient.unique()) == output.numel()


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_a_model_whose_hooks_compute_weights_is_copied() -> None:
    net = torch.nn.Sequential(torch.nn.utils.weight_norm(torch.nn.Conv2d(3, 4, 3)))
    net(torch.zeros(1, 3, 8, 8))
    normed = ExactnessTrial(net, (1, 1), 8, torch.float64, CPU, steps=1)
    assert PlainTraining(normed).step(0).gradients.keys() == {"0.bias", "0.weight_g", "0.weight_v"}


def test_complex_parameters_keep_both_parts_and_are_compared_in_both() -> None:
    torch.manual_seed(0)
    spectral = ExactnessTrial(FourierNet(), (2, 1), 12, torch.float64, CPU, steps=1)
    weight = spectral.fresh_module().get_parameter("weight")
    assert weight.dtype == torch.complex128
    assert weight.imag.abs().min() > 0
    ours = PlainTraining(spectral).step(0)
    turned = {**ours.gradients, "weight": ours.gradients["weight"].conj()}
    errors = compare(ours, [dataclasses.replace(ours, gradients=turned)], parameters(spectral))
    assert errors.largest == errors.of_tensors["gradients"]["weight"] > 0.1
