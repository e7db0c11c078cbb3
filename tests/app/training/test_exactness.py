"""The comparison with the plain step: what counts as an error, losses and devices of several kinds."""

import dataclasses
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from app.training.engines import build_engine
from app.training.exactness import FLOOR, TOLERANCE, compare, verify_engine
from app.training.model import refuse_draws
from app.training.plain_training import ExactnessTrial, PlainTraining, RandomProjectionLoss
from benchmarks.whole_engine import whole_engine
from models.losses import PixelClassLoss
from models.registry import build_model
from models.unet import UNet
from parallel.comm.kinds import RankKind
from parallel.comm.mixed_comm import MixedCommunicator
from parallel.comm.thread_comm import LocalCommunicator, run_on_threads
from parallel.memory.policy import ActivationPolicy
from parallel.schedule.shares import split_batch
from parallel.strategy import Strategy
from tests.helpers.small_nets import FourierNet
from tests.helpers.tiny_models import classifier

CPU = torch.device("cpu")


def trial_of(net, sizes, side, steps=1, dtype=torch.float64, **more):
    return ExactnessTrial(net, sizes, side, dtype, CPU, steps=steps, **more)


@pytest.fixture(scope="module")
def trial():
    torch.manual_seed(0)
    return trial_of(classifier(3), (2, 1), 48, steps=2)


@pytest.fixture(scope="module")
def plain(trial):
    return PlainTraining(trial).step(0)


@pytest.fixture(scope="module")
def names(trial):
    return [name for name, _ in trial.module.named_parameters()]


@pytest.fixture
def errors(plain, names):
    """The errors of ranks that differ from the plain step in what is given."""

    def of_ranks(*ranks, expected=plain):
        return compare(expected, [dataclasses.replace(plain, **changed) for changed in ranks], names)

    return of_ranks


def test_an_engine_on_one_rank_is_exact(trial, names):
    make = functools.partial(whole_engine, batch=3, m=2, shape=(2, 3, 48, 48), seed=0)
    errors = verify_engine(trial, make, LocalCommunicator())
    assert errors.largest == 0.0
    assert set(errors.of_tensors["gradients"]) == set(names)
    kept = {name.split(".")[-1] for name in errors.of_tensors["statistics"]}
    assert kept == {"running_mean", "running_var", "num_batches_tracked"}
    assert set(errors.of_tensors["optimizer"]) == {f"{name}.momentum_buffer" for name in names}


@pytest.mark.parametrize("kind", ["gradients", "parameters", "statistics"])
def test_a_changed_value_is_found_where_it_is(kind, plain, errors):
    name = "4.running_mean" if kind == "statistics" else "3.weight"
    tensors = plain.gradients if kind == "gradients" else plain.state["model"]
    changed = {key: value.clone() for key, value in tensors.items()}
    changed[name].view(-1)[0] += 0.5 * float(tensors[name].abs().max())
    found = errors({"gradients": changed} if kind == "gradients" else {"state": {**plain.state, "model": changed}})
    assert found.largest == found.of_tensors[kind][name] == found.of_kind(kind) == pytest.approx(0.5)
    assert found.by_group()[name[0]][kind] == found.largest
    assert found.excesses == [(kind, name)]


def test_any_rank_and_any_step_may_be_the_one_that_is_wrong(plain, errors):
    wrong = {"loss": plain.loss * 1.25}
    assert errors({}, wrong).loss == pytest.approx(0.25)
    half = dict(list(plain.gradients.items())[:2])
    doubled = {name: 2 * value for name, value in half.items()}
    assert errors({}, {"gradients": half}, {"gradients": doubled}).largest == pytest.approx(1.0)
    right, off = errors({}), errors(wrong)
    assert right.joined(off) == off.joined(right)
    assert not right.joined(off).passed
    assert right.joined(right).passed


def test_a_gradient_that_is_missing_or_not_finite_is_an_error(plain, errors):
    fewer = {name: value for name, value in plain.gradients.items() if name != "0.weight"}
    assert errors({"gradients": fewer}).of_tensors["gradients"]["0.weight"] == 1.0
    broken = {"0.weight": plain.gradients["0.weight"] * torch.nan}
    assert errors({"gradients": plain.gradients | broken}).largest == math.inf
    assert errors({"gradients": plain.gradients | {"more": torch.ones(2)}}).largest > 0.1


def test_what_is_rounding_only_is_held_against_the_largest_of_its_kind(plain, errors):
    largest = max(float(value.abs().max()) for value in plain.gradients.values())
    noise = torch.full((8,), 1e-15 * largest, dtype=torch.float64)
    expected = dataclasses.replace(plain, gradients={**plain.gradients, "0.bias": noise})
    found = errors({"gradients": {**plain.gradients, "0.bias": -noise}}, expected=expected)
    assert found.largest == pytest.approx(2e-15 / FLOOR)


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
def test_counters_and_infinite_values_are_compared(expected, found, error, plain, errors):
    """Beside running statistics of any size."""
    theirs, ours = ({**plain.state, "model": {**plain.state["model"], "buffer": value}} for value in (expected, found))
    assert errors({"state": ours}, expected=dataclasses.replace(plain, state=theirs)).largest == pytest.approx(error)


def test_every_output_and_every_target_counts():
    output = {"out": torch.randn(2, 3), "aux": (torch.randn(2, 4, 5),)}
    targets, projected_error = torch.zeros(2, 6, 5), RandomProjectionLoss()
    loss = projected_error(output, targets)
    assert projected_error(output, targets + torch.tensor([0.0, 1.0])[:, None, None]) != loss
    assert projected_error({**output, "aux": (output["aux"][0] * 2,)}, targets) != loss
    halves = [
        projected_error({"out": output["out"][k], "aux": (output["aux"][0][k],)}, targets[k])
        for k in (slice(0, 1), slice(1, 2))
    ]
    assert sum(halves) / 2 == pytest.approx(float(loss))
    assert projected_error({**output, "own loss": torch.tensor(3.0)}, targets) > loss


def test_boxes_of_a_map_add_up_and_every_px_of_it_counts():
    generator = torch.Generator().manual_seed(0)
    output, targets = (torch.randn(shape, generator=generator).double() for shape in ((2, 3, 6, 5), (2, 6, 5)))
    loss = RandomProjectionLoss()
    parts = [(slice(None), slice(0, 4)), (slice(0, 5), slice(4, 5)), (slice(5, 6), slice(4, 5))]
    sums = sum(loss.sums(output[:, :, rows, columns], targets[:, rows, columns]) for rows, columns in parts)
    assert float(loss.value(sums, 30)) == pytest.approx(float(loss(output, targets)), rel=1e-12)
    output.requires_grad_()
    (gradient,) = torch.autograd.grad(loss(output, targets), output)
    assert len(gradient.unique()) == output.numel()


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_a_model_whose_hooks_compute_weights_is_copied():
    net = nn.Sequential(nn.utils.weight_norm(nn.Conv2d(3, 4, 3)))
    net(torch.zeros(1, 3, 8, 8))
    gradients = PlainTraining(trial_of(net, (1, 1), 8)).step(0).gradients
    assert gradients.keys() == {"0.bias", "0.weight_g", "0.weight_v"}


def test_complex_parameters_keep_both_parts_and_are_compared_in_both():
    torch.manual_seed(0)
    spectral = trial_of(FourierNet(), (2, 1), 12)
    weight = spectral.fresh_module().get_parameter("weight")
    assert weight.dtype == torch.complex128
    assert weight.imag.abs().min() > 0
    ours = PlainTraining(spectral).step(0)
    turned = {**ours.gradients, "weight": ours.gradients["weight"].conj()}
    names = [name for name, _ in spectral.module.named_parameters()]
    errors = compare(ours, [dataclasses.replace(ours, gradients=turned)], names)
    assert errors.largest == errors.of_tensors["gradients"]["weight"] > 0.1


WEIGHTS = torch.tensor([0.5, 2.0, 1.0])
LOSSES = {
    "cross entropy": PixelClassLoss(WEIGHTS, dice=False, label_smoothing=0.1),
    "dice": PixelClassLoss(WEIGHTS, label_smoothing=0.1),
    "focal": PixelClassLoss(WEIGHTS, dice=False, gamma=2.0),
}
BOXES = ActivationPolicy(stream=24)


@pytest.mark.parametrize(
    ("loss", "name", "policy"),
    [
        ("dice", "ddp", ActivationPolicy()),
        ("dice", "1f1b", BOXES),
        ("cross entropy", "1f1b", ActivationPolicy()),
        ("focal", "ddp", ActivationPolicy()),
    ],
)
def test_a_loss_that_a_run_may_minimise_is_that_of_the_plain_step(loss, name, policy):
    """Under strategies that cut the batch, the model or the tile; three microbatches are shares of 3 tiles and 1."""
    torch.manual_seed(0)
    net = UNet(classes=3, norm="frozen", base=4, depth=2)
    trial = trial_of(net, (2, 1, 1), 40, loss=LOSSES[loss], classes=3)
    strategy = Strategy(name, 2, 2 if name == "1f1b" else 1, 3, policy=policy)
    make = functools.partial(build_engine, strategy, batch=4, tile=40, seed=trial.seed, device=CPU)
    assert run_on_threads(2, lambda c, _: verify_engine(trial, make, c), timeout_s=60)[0].largest <= 1e-10


@pytest.mark.parametrize(("way", "dtype"), [("host", torch.float64), ("device", torch.float32)])
def test_shares_of_unequal_devices_are_the_plain_step(way, dtype):
    """The GPU is a stand-in: a rank on the CPU that the table of devices calls otherwise."""
    strategy, kinds = (
        Strategy("ddp", 2, 1, 4, shares=((0, 1, 2), (3,))),
        [RankKind("a", "cuda", "0"), RankKind("a", "cpu")],
    )
    torch.manual_seed(0)
    sizes = tuple(map(len, split_batch(7, strategy.m)))
    steps = 3 if dtype == torch.float64 else 1
    trial = trial_of(build_model("resnet11_v2", classes=3), sizes, 32, steps, dtype)
    make_engine = functools.partial(build_engine, strategy, batch=7, tile=32, seed=0, device=CPU)
    engines = {}

    def run(inner, _):
        def make(*given):
            return engines.setdefault(inner.rank, make_engine(*given))

        return verify_engine(trial, make, MixedCommunicator(inner, kinds, way))

    assert run_on_threads(2, run)[0].largest <= TOLERANCE[dtype]
    for name, gradient in engines[0].gradients().items():
        assert torch.equal(gradient, engines[1].gradients()[name]), name


class Attending(nn.Module):
    """Attention that could drop."""

    def __init__(self, drops):
        super().__init__()
        self.drops = drops

    def forward(self, images):
        queries = images.flatten(2)
        return F.scaled_dot_product_attention(queries, queries, queries, dropout_p=self.drops)


class Looking(nn.Module):
    """Goes by its values."""

    def forward(self, images):
        return images if images.sum() > 0 else -images


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        *((model, None) for model in (nn.Dropout(0.0), nn.ReLU(), nn.BatchNorm2d(3), Attending(0.0))),
        (nn.Dropout(0.5), r"draws random numbers \(\w+\), and a CPU and a GPU draw others from one seed"),
        (nn.RReLU(), r"draws random numbers \(rrelu\w*\)"),
        (Attending(0.1), "draws random numbers"),
        (Looking(), "could not be looked into for random numbers"),
    ],
)
def test_models_that_draw_or_hide_it_are_refused_on_mixed_devices(model, reason):
    state = torch.get_rng_state()
    if reason is None:
        refuse_draws(model.eval(), (2, 3, 8, 8))
        assert not model.training
    else:
        with pytest.raises(ValueError, match=f"--device mixed: the model {reason}"):
            refuse_draws(model, (2, 3, 8, 8))
    assert torch.equal(state, torch.get_rng_state())
