"""Layer-wise learning rates, weight decay, frozen parts and averaged weights: those of one process with torch's own
means, whatever the strategy."""

import copy
import dataclasses
import functools
import math
import types

import pytest
import timm
import torch
from timm.optim import param_groups_weight_decay
from torch import nn
from torch.optim.swa_utils import AveragedModel

from app.settings.optimization import ModelSettings, OptimizerSettings
from app.settings.run import DataSettings, RunConfig
from app.training.engines import build_engine, build_optimizer
from app.training.model import build_run_model
from app.training.session import Session
from models.layer_depth import freeze, layer_decay_scales
from models.losses import PixelClassLoss
from models.registry import build_model
from models.unet import UNet
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.optimizer_step import averages_of
from parallel.engine.step import Microbatch
from parallel.memory.policy import ActivationPolicy
from parallel.strategy import Strategy

CPU = torch.device("cpu")
SIZES, PX, STEPS, LR, DECAY, EMA = (2, 1, 1), 16, 3, 0.05, 0.7, 0.6
WEIGHT_DECAY = 0.1
SETTINGS = OptimizerSettings(optimizer="sgd", lr=LR, momentum=0.9, weight_decay=WEIGHT_DECAY, ema=EMA)
LOSS = PixelClassLoss()


@functools.cache
def model():
    """A U-Net whose first level and deepest convolution are frozen, batch norm included."""
    torch.manual_seed(0)
    net = UNet(classes=3, norm="batch", base=4, depth=2).double()
    for norm in (part for part in net.modules() if isinstance(part, nn.BatchNorm2d)):
        norm.running_mean.uniform_(-0.1, 0.1)  # that those of frozen parts are used is seen in all numbers
    freeze(net, ("encoder.0", "encoder.2.1"))
    return net


@functools.cache
def microbatch(step, i):
    generator = torch.Generator().manual_seed(100 * step + i)
    images = torch.randn(SIZES[i], 3, PX, PX, generator=generator, dtype=torch.float64)
    return images, torch.randint(0, 3, (SIZES[i], PX, PX), generator=generator, dtype=torch.uint8)


def rate(step):
    return LR / (step + 1)


def test_frozen_parts_without_weights_are_named(tmp_path):
    torch.save(timm.create_model("test_resnet").state_dict(), tmp_path / "encoder.pt")
    net = ModelSettings("unet:test_resnet", weights=str(tmp_path / "encoder.pt"))
    for name, end in (("trunk", "; frozen at random, as no weights were loaded there: decoder, full"), ("encoder", "")):
        config = RunConfig(DataSettings(tmp_path), net=net, optimization=OptimizerSettings(freeze=(name,)))
        (note,) = (n for n in build_run_model(config, 2, (1, 3, 64, 64))[1].notes if n.startswith("--freeze"))
        assert note.endswith(" numbers are trained" + (f"{end}; use --freeze encoder" if end else ""))


def test_the_rate_rises_linearly_and_falls_as_a_cosine():
    config = types.SimpleNamespace(optimization=dataclasses.replace(SETTINGS, warmup=4))
    session = types.SimpleNamespace(config=config, total_steps=12)
    rates = [Session.learning_rate(session, step) / LR for step in range(12)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, *((1 + math.cos(k * math.pi / 8)) / 2 for k in range(8))])


@functools.cache
def plain():
    """The steps written out: groups by hand, torch's own average."""
    net = copy.deepcopy(model()).train()
    scales = layer_decay_scales(net, DECAY)
    groups = [
        {"params": [p], "scale": scales[name], "weight_decay": WEIGHT_DECAY * (p.ndim > 1)}
        for name, p in net.named_parameters()
    ]
    optimizer = torch.optim.SGD(groups, lr=LR, momentum=0.9)
    average = AveragedModel(
        net, avg_fn=lambda mean, new, n: torch.lerp(new, mean, min(EMA, (1 + int(n)) / (10 + int(n))))
    )
    losses = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate(step) * group["scale"]
        optimizer.zero_grad()
        parts = [LOSS(net(x), y) * (len(x) / sum(SIZES)) for x, y in (microbatch(step, i) for i in range(len(SIZES)))]
        sum(parts).backward()
        optimizer.step()
        average.update_parameters(net)
        losses.append(float(sum(parts).detach()))
    averaged = copy.deepcopy(net)
    averaged.load_state_dict(net.state_dict() | dict(average.module.named_parameters()))
    return {
        "losses": losses,
        "gradients": {name: p.grad for name, p in net.named_parameters() if p.grad is not None},
        "state": net.state_dict(),
        "average": {n: p.detach() for n, p in average.module.named_parameters() if p.requires_grad},
        "predicted": averaged.eval()(microbatch(9, 0)[0]).detach(),
    }


def engine_of(strategy, net, make, communicator):
    more = {"batch": sum(SIZES), "tile": PX, "seed": 0, "device": CPU}
    return build_engine(strategy, copy.deepcopy(net), LOSS, make, communicator, **more)


def parts_of(engine, step):
    """Return what this rank reads of a step."""
    given = [(microbatch(step, i), engine.wants(i)) for i in engine.share]
    return [Microbatch(x if w.images else None, y if w.targets else None, x.shape) for (x, y), w in given]


def rank(communicator, strategy):
    """Return what a rank has after the steps; two of them by one engine, the last by another from the checkpoint."""
    net = copy.deepcopy(model())
    make = functools.partial(build_optimizer, SETTINGS, scales=layer_decay_scales(net, DECAY))
    losses = []
    state = {}
    for steps in (range(STEPS - 1), range(STEPS - 1, STEPS)):
        engine = engine_of(strategy, net, make, communicator)
        if losses:
            engine.load_state_dict(state)
        for step in steps:
            losses.append(engine.step(parts_of(engine, step), step, rate(step)).loss)
        gradients = {name: gradient.clone() for name, gradient in engine.gradients().items()}
        state = shared(communicator, copy.deepcopy(engine.state_dict()))
        with engine.averaged():
            images, wants = microbatch(9, 0)[0], engine.predict_wants
            predicted = engine.predict(Microbatch(images if wants.images else None, None, images.shape))
        again = shared(communicator, copy.deepcopy(engine.state_dict()))
        assert all(torch.equal(value, state["model"][name]) for name, value in again["model"].items())
        assert all(torch.equal(value, averages_of(state)[name]) for name, value in averages_of(again).items())
        engine.close()
    return {"losses": losses, "gradients": gradients, "state": state, "predicted": predicted}


SHARED = {}


def shared(communicator, state):
    """The first rank's state, on all: ranks are threads."""
    if communicator.rank == 0:
        SHARED[0] = state
    communicator.barrier()
    state = copy.deepcopy(SHARED[0])
    communicator.barrier()
    return state


def error(expected, found):
    return max(float((found[k] - v).abs().max() / v.abs().max().clamp(min=1e-3)) for k, v in expected.items())


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy("single", 1, 1, 3, policy=ActivationPolicy(optimizer=True)),
        Strategy("ddp", 2, 1, 3, policy=ActivationPolicy(stream=12)),
        pytest.param(
            Strategy("1f1b", 2, 2, 3, policy=ActivationPolicy(optimizer=True, recompute="block")),
            marks=pytest.mark.long,
        ),
        Strategy("bidirectional", 2, 2, 3, zero=1),
    ],
    ids=lambda s: f"{s.name}{'-host' * s.policy.optimizer}{'-zero' * s.zero}",
)
def test_updates_and_averages_are_those_of_one_process(strategy):
    expected = plain()
    ranks = run_on_threads(strategy.ranks, rank, strategy, timeout_s=60)
    frozen = {name for name, parameter in model().named_parameters() if not parameter.requires_grad}
    found = {}
    for result in ranks:
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-10)
        found |= result["gradients"]
    assert found.keys() == expected["gradients"].keys()
    assert frozen.isdisjoint(found)
    assert error(expected["gradients"], found) <= 1e-10
    state = ranks[0]["state"]
    assert error(expected["state"], state["model"]) <= 1e-10
    assert averages_of(state).keys() == expected["average"].keys()
    assert error(expected["average"], averages_of(state)) <= 1e-10
    outputs = [result["predicted"] for result in ranks if result["predicted"] is not None]
    assert outputs
    assert all(torch.allclose(output.double(), expected["predicted"], rtol=1e-4, atol=1e-5) for output in outputs)
    before = model().state_dict()
    assert all(torch.equal(state["model"][name], before[name]) for name in before if name.startswith("encoder.0."))


@pytest.mark.parametrize("name", ["timm:convnext_atto", "unet_w4"])
def test_weights_decay_as_in_timm(name):
    net = build_model(name, classes=2, norm="batch", head="average")
    without, decaying = param_groups_weight_decay(net, WEIGHT_DECAY)
    for settings, expected in (
        (SETTINGS, {WEIGHT_DECAY: decaying["params"], 0.0: without["params"]}),
        (dataclasses.replace(SETTINGS, decay_all=True), {WEIGHT_DECAY: list(net.parameters())}),
        (dataclasses.replace(SETTINGS, weight_decay=0.0), {0.0: list(net.parameters())}),
    ):
        groups = build_optimizer(settings, net.named_parameters()).param_groups
        assert {group["weight_decay"]: set(map(id, group["params"])) for group in groups} == {
            decay: set(map(id, parameters)) for decay, parameters in expected.items()
        }


@pytest.mark.parametrize("kind", ["ddp", "1f1b"])
def test_optimizer_state_is_never_loaded_into_other_groups(kind):
    """A checkpoint from before biases and norms had no decay goes with ``decay_all``, else there is one message."""

    def state_after_a_step(communicator, settings):
        strategy = Strategy(kind, 2, 2 if kind == "1f1b" else 1, 3)
        make = functools.partial(build_optimizer, settings)
        engine = engine_of(strategy, model(), make, communicator)
        engine.step(parts_of(engine, 0), 0, LR)
        return engine, shared(communicator, copy.deepcopy(engine.state_dict()))

    def rank(communicator, _):
        everything = dataclasses.replace(SETTINGS, decay_all=True)
        engine, old = state_after_a_step(communicator, everything)
        engine.load_state_dict(old)
        assert_same_state(shared(communicator, engine.state_dict()), old)
        assert {group["weight_decay"] for group in old["optimizer"]["param_groups"]} == {WEIGHT_DECAY}
        engine, new = state_after_a_step(communicator, SETTINGS)
        engine.load_state_dict(new)
        assert_same_state(shared(communicator, engine.state_dict()), new)
        assert [n for group in new["optimizer"]["param_groups"] for n in group["params"]] == [*range(len(NAMES))]
        with pytest.raises(ValueError, match=rf"weight_decay {WEIGHT_DECAY} for .*, this one has 0.0"):
            engine.load_state_dict(old)

    run_on_threads(2, rank, timeout_s=60)


NAMES = [name for name, _ in model().named_parameters()]


def assert_same_state(found, expected):
    assert found["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    assert found["optimizer"]["state"].keys() == expected["optimizer"]["state"].keys()
    for number, state in expected["optimizer"]["state"].items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(found["optimizer"]["state"][number][key]), torch.as_tensor(value))
