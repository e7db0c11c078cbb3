"""Steps on bags of tiles: gradients are those of the loss of all tiles of a bag at once, whatever the strategy."""

import copy
import functools
import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from app.launch.place import RankPlacement
from app.settings.optimization import ModelSettings, OptimizerSettings
from app.settings.run import DataSettings, RunConfig, StreamSettings
from app.training.dataset import class_counts
from app.training.engines import build_engine, build_optimizer
from app.training.model import build_loss, build_run_model
from app.training.session import Session
from app.training.steps import BagSteps
from models.heads import BagGradient, BagLoss, bag_logits, put_bag_head
from parallel.comm.thread_comm import LocalCommunicator, run_on_threads
from parallel.engine.step import Microbatch, NonFiniteLoss, microbatch_seed
from parallel.memory.policy import ActivationPolicy
from parallel.offload.live_bytes import LiveBytes
from parallel.offload.rng import drawing
from parallel.space.team import TeamGrid
from parallel.strategy import Strategy

CPU = torch.device("cpu")
BAG, BAGS, M, PX, CLASSES, LR = 3, 2, 3, 16, 3, 0.1
TILES = BAG * BAGS
RANGES = tuple(range(i, i + TILES // M) for i in range(0, TILES, TILES // M))
LOSS = BagLoss(torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64), label_smoothing=0.1)
LABELS = torch.arange(CLASSES)
"""Of slides, which are as many as classes."""
SGD = OptimizerSettings(optimizer="sgd", lr=LR, momentum=0.9, weight_decay=0.0)


@functools.cache
def model(dropout=0.0):
    torch.manual_seed(0)
    widths = (3, 6, 8)
    layers = []
    for channels, out in itertools.pairwise(widths):
        layers += [nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(), nn.MaxPool2d(2)]
    drop = [nn.Dropout(dropout)] if dropout else []
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *drop, nn.Linear(8, CLASSES)).double()
    put_bag_head(net, "net", CLASSES)
    return net.double()


def drawn(step):
    return torch.tensor([1, 2]).repeat_interleave(BAG)


@functools.cache
def tiles(step):
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(TILES, 3, PX, PX, generator=generator, dtype=torch.float64)
    return images, drawn(step)


def outputs_of(net, step):
    """All outputs, in microbatches as the engine has them."""
    images, _ = tiles(step)
    parts = []
    for i, part in enumerate(RANGES):
        with drawing(microbatch_seed(0, step, i), CPU):
            parts.append(net(images[part.start : part.stop]))
    return torch.cat(parts)


def plain(dropout, steps=2):
    """Losses, gradients and state of steps whose graph holds all tiles at once."""
    net = copy.deepcopy(model(dropout)).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        labels = tiles(step)[1].view(BAGS, BAG)[:, 0]
        loss = LOSS(outputs_of(net, step).view(BAGS, BAG, -1), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {n: p.grad for n, p in net.named_parameters() if p.grad is not None}, net.state_dict()


def engine_of(strategy, communicator, net, batch=TILES):
    make = functools.partial(build_optimizer, SGD, scales={})
    return build_engine(strategy, net, BagGradient(), make, communicator, batch=batch, tile=PX, seed=0, device=CPU)


def rank(communicator, case):
    strategy, dropout = case
    engine = engine_of(strategy, communicator, copy.deepcopy(model(dropout)))
    bags = BagSteps(engine, LOSS, communicator, size=BAG, classes=CLASSES, labels=LABELS, drawn=drawn, ranges=RANGES)

    def microbatches(step):
        for i in engine.share:
            x, y = (part[RANGES[i].start : RANGES[i].stop] for part in tiles(step))
            wants = engine.wants(i)
            yield Microbatch(x if wants.images else None, y if wants.targets else None, x.shape)

    losses = [bags.step(functools.partial(microbatches, step), step, LR).loss for step in range(2)]
    gradients = {name: gradient.clone() for name, gradient in engine.gradients().items()}
    state = copy.deepcopy(engine.state_dict())
    engine.close()
    return {"losses": losses, "gradients": gradients, "state": state}


def error(expected, found):
    return max(float((found[k] - v).abs().max() / v.abs().max().clamp(min=1e-3)) for k, v in expected.items())


TEAM = TeamGrid(2, 1)


@pytest.mark.parametrize(
    ("strategy", "dropout"),
    [
        (Strategy("single", 1, 1, M), 0.0),
        (Strategy("single", 1, 1, M, policy=ActivationPolicy(recompute="block", offload=True)), 0.5),
        (Strategy("single", 1, 1, M, policy=ActivationPolicy(stream=8)), 0.0),
        (Strategy("ddp", 3, 1, M), 0.5),
        (Strategy("1f1b", 2, 2, M), 0.5),
        (Strategy("zero-bubble", 2, 2, M), 0.0),
        (Strategy("master", 2, 2, M), 0.0),
        (Strategy("spatial", 2, 1, M, grid=TEAM), 0.0),
        (Strategy("1f1b", 4, 2, M, grid=TEAM, policy=ActivationPolicy(recompute="block")), 0.5),
    ],
    ids=lambda value: f"{value.name}{'-team' * (value.grid is not None)}" if isinstance(value, Strategy) else None,
)
def test_gradients_are_those_of_the_loss_of_all_tiles_at_once(strategy, dropout):
    losses, gradients, state = plain(dropout)
    ranks = run_on_threads(strategy.ranks, rank, (strategy, dropout), timeout_s=60)
    found = {}
    for result in ranks:
        assert result["losses"] == pytest.approx(losses, rel=1e-10)
        found |= result["gradients"]
    assert found.keys() == gradients.keys()
    assert error(gradients, found) <= 1e-10
    assert error(state, ranks[0]["state"]["model"]) <= 1e-10


SECOND_BAG, NO_BAG = [(1, 1, 0, 2, 2, 2), (0, 0, 0, 2, 2, 2)], (1, 1, 0, 0, 0, 0)
"""Slides of tiles, where that of the first bag failed before its last tile, or at once; and those of both."""


def torn(communicator, slides):
    engine = engine_of(Strategy("ddp", 3, 1, M), communicator, copy.deepcopy(model()))
    bags = BagSteps(engine, LOSS, communicator, size=BAG, classes=CLASSES, labels=LABELS, drawn=drawn, ranges=RANGES)
    images, parts = tiles(0)[0], [RANGES[i] for i in engine.share]
    microbatches = [
        Microbatch(images[part.start : part.stop], torch.tensor(slides[part.start : part.stop]), (2, 3, PX, PX))
        for part in parts
    ]
    loss = bags.step(microbatches.copy, 0, LR).loss
    gradients = {name: gradient.clone() for name, gradient in engine.gradients().items()}
    engine.close()
    return loss, gradients


@pytest.mark.parametrize("slides", SECOND_BAG)
def test_a_bag_with_tiles_of_another_slide_is_left_out(slides):
    """A slide that failed was replaced by the next from there on, with the label of the first."""
    net = copy.deepcopy(model()).train()
    expected = LOSS(outputs_of(net, 0)[None, BAG:], torch.tensor([2]))
    expected.backward()
    for loss, gradients in run_on_threads(3, torn, slides, timeout_s=60):
        assert loss == pytest.approx(float(expected.detach()), rel=1e-10)
        assert error({name: parameter.grad for name, parameter in net.named_parameters()}, gradients) <= 1e-10
    for loss, gradients in run_on_threads(3, torn, NO_BAG, timeout_s=60):
        assert loss == 0
        assert not any(gradient.any() for gradient in gradients.values())


def test_memory_does_not_grow_with_the_bag():
    """Two bags of 3 and one of 24 tiles, in microbatches of 2: all activations but those of one microbatch are gone."""
    images, labels, peaks = torch.randn(2, 3, PX, PX, dtype=torch.float64), torch.tensor([1, 1]), []
    for bag, bags in ((3, 2), (24, 1)):
        count = bag * bags
        ranges = tuple(range(i, i + 2) for i in range(0, count, 2))
        engine = engine_of(Strategy("single", 1, 1, len(ranges)), LocalCommunicator(), copy.deepcopy(model()), count)
        given = {"size": bag, "classes": CLASSES, "labels": LABELS, "ranges": ranges}
        steps = BagSteps(engine, LOSS, LocalCommunicator(), drawn={0: torch.ones(count).long()}.get, **given)
        microbatches = [Microbatch(images, labels, images.shape)] * len(ranges)
        with LiveBytes() as live:
            steps.step(microbatches.copy, 0, LR)
        peaks.append(live.peak_bytes - count * 200)  # outputs and their gradients are numbers of each tile
    assert peaks[1] <= peaks[0]


def test_logits_of_a_bag_are_those_of_the_mean_feature():
    """Ilse et al. 2018: attention averages features, and a linear classifier takes the average."""
    torch.manual_seed(0)
    classifier, features = nn.Linear(5, CLASSES).double(), torch.randn(1, 7, 5, dtype=torch.float64)
    net = nn.Sequential(classifier)
    put_bag_head(net, "net", CLASSES)
    head = net.double()[0]
    scores = head.score(torch.tanh(head.value(features)) * torch.sigmoid(head.gate(features)))
    pooled = (scores.softmax(1) * features).sum(1)
    torch.testing.assert_close(bag_logits(head(features[0])[None]), classifier(pooled))


def test_a_loss_that_is_not_finite_updates_nothing():
    communicator = LocalCommunicator()
    engine = engine_of(Strategy("single", 1, 1, M), communicator, copy.deepcopy(model()))
    before = copy.deepcopy(engine.state_dict()["model"])
    images, labels = tiles(0)
    images = images.clone()
    images[4] = torch.nan
    bags = BagSteps(engine, LOSS, communicator, size=BAG, classes=CLASSES, labels=LABELS, drawn=drawn, ranges=RANGES)

    def microbatches():
        return (Microbatch(images[r.start : r.stop], labels[r.start : r.stop], (2, 3, PX, PX)) for r in RANGES)

    with pytest.raises(NonFiniteLoss) as fault:
        bags.step(microbatches, 0, LR)
    assert fault.value.microbatches == [1, 2]  # those of the second bag
    after = engine.state_dict()["model"]
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_model_that_does_not_end_in_a_linear_layer_is_refused():
    with pytest.raises(ValueError, match="its last layer is no linear layer with one output for each of the 2 classes"):
        put_bag_head(nn.Sequential(nn.Conv2d(3, 2, 1)), "mine", 2)


def test_a_model_whose_state_two_forward_passes_would_update_twice_is_refused(tmp_path):
    """One rank updated it twice in each step, without an error."""
    net, stream = ModelSettings("tests.helpers.updating_nets:averaging"), StreamSettings(bag=4)
    config = RunConfig(DataSettings(tmp_path), net=net, stream=stream)
    dataset = SimpleNamespace(slide_labels={"a": 0}, classes=("x", "y", "z"), tiles=SimpleNamespace(largest=(PX, PX)))
    place = RankPlacement(LocalCommunicator(), CPU)
    with pytest.raises(ValueError, match=r"forward pass updates 2\.ema: --bag makes two forward passes"):
        Session(config, Strategy("single", 1, 1, M), dataset, place, None, None)


def test_weights_with_and_without_attention_scores_are_loaded(tmp_path):
    """The head of ConvNeXt has a norm beside the classifier: a file without scores was refused as another model's."""
    name, path = "timm:convnext_atto", tmp_path / "weights.pt"

    def built(bag):
        config = RunConfig(DataSettings(tmp_path), stream=StreamSettings(bag=bag))
        weights = str(path) if path.exists() else None
        config = replace(config, net=ModelSettings(name, weights=weights), seed=bag)
        return build_run_model(config, 2, (1, 3, 64, 64))[0].state_dict()

    plain = built(0)
    torch.save(plain, path)
    in_bags = built(4)
    assert all(torch.equal(in_bags[key.replace("head.fc.", "head.fc.classifier.")], plain[key]) for key in plain)
    torch.save(in_bags, path)
    again = built(5)
    assert again.keys() == in_bags.keys()
    assert all(torch.equal(again[key], in_bags[key]) for key in in_bags)
    without = built(0)
    assert without.keys() == plain.keys()
    assert all(torch.equal(without[key], in_bags[key]) for key in plain if not key.startswith("head.fc."))


def test_classes_of_bags_and_of_slides_drawn_equally_often_are_counted_by_slide(caplog):
    """With ``--sample slide`` classes of large slides were once weighed down by their tiles."""
    tiles = SimpleNamespace(slides=("a", "b", "c"), slide=np.array([0] * 90 + [1] * 5 + [2] * 5))
    labels = {"a": 0, "b": 1, "c": 1}
    dataset = SimpleNamespace(
        task="classify", tiles=tiles, slide_labels=labels, classes=("x", "y"), tile_labels=np.repeat([0, 1], [90, 10])
    )
    assert class_counts(dataset, np.arange(100)).tolist() == [90, 10]
    assert class_counts(dataset, np.arange(100), of_slides=True).tolist() == [1, 2]
    settings, communicator = OptimizerSettings(class_weights="balanced"), LocalCommunicator()
    with caplog.at_level("INFO"):
        loss = build_loss(settings, dataset, np.arange(100), communicator, by_slide=True)
    assert loss.class_weights.tolist() == [1.5, 0.75]
    assert "--class-weights balanced: x 1.5, y 0.75" in caplog.text
    dataset.slide_labels = {}  # classes are drawn on tiles
    loss = build_loss(settings, dataset, np.arange(100), communicator, by_slide=True)
    assert loss.class_weights.tolist() == pytest.approx([100 / 180, 5])
