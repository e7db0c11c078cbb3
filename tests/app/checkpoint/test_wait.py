"""No update gets into a checkpoint that is being copied, whatever engine it is of; without the wait it would."""

import copy
import functools
import threading

import pytest
import torch
from torch.nn.functional import cross_entropy

from app.checkpoint import two_phase
from app.checkpoint.file import load_checkpoint, save_checkpoint
from app.checkpoint.two_phase import TwoPhaseCheckpoints, tensors_in
from benchmarks.whole_engine import whole_engine
from parallel.comm.thread_comm import LocalCommunicator, run_on_threads
from parallel.memory.policy import ActivationPolicy
from tests.helpers import updating_nets
from tests.helpers.engine_runs import build, net, steps_of, strategy_for, train
from tests.helpers.small_nets import NETS

CPU = torch.device("cpu")
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)
M = 5


def whole(on_host=False, resident=False):
    def make(communicator):
        policy = ActivationPolicy(optimizer=on_host, parameters=resident)
        model, loss = net("skips", torch.float32), NETS["skips"][1]
        return whole_engine(model, loss, ADAMW, communicator, batch=2 * M, m=M, policy=policy)

    return make


def split(schedule, **more):
    strategy = strategy_for(schedule, 2, **more)
    return lambda communicator: build(communicator, "skips", strategy, steps_of(M, torch.float32), make_optimizer=ADAMW)


ENGINES = {
    "whole": (1, whole()),
    "whole, optimizer on the host": (1, whole(on_host=True)),
    "whole, parameters on the host": (1, whole(on_host=True, resident=True)),
    "stages": (2, split("gpipe")),
    "stages, optimizer on the host": (2, split("gpipe", policy=ActivationPolicy(optimizer=True))),
    "replicas, optimizer divided": (2, split("master", m=4, zero=1)),
}


class SlowCopy:
    """Lets the copy on the other thread begin only when an update stands before it, and gives the update time to be
    done: all of it where nothing makes it wait."""

    def __init__(self, waits):
        self.before_update, self.updated = threading.Event(), threading.Event()
        self.patience_s = 0.3 if waits else 60
        self._plain = two_phase.copy_bytes

    def copy_bytes(self, source, target):
        if threading.current_thread().name == "checkpoint":
            assert self.before_update.wait(60)
            if self.patience_s:
                self.updated.wait(self.patience_s)
                self.patience_s = 0
        self._plain(source, target)


@pytest.mark.parametrize(("name", "waits"), [*((name, True) for name in ENGINES), ("stages", False)])
def test_update_waits_for_the_copy(name, waits, tmp_path, monkeypatch):
    world, make = ENGINES[name]
    slow = SlowCopy(waits)
    monkeypatch.setattr(two_phase, "copy_bytes", slow.copy_bytes)
    steps = steps_of(4 if "replicas" in name else M, torch.float32)
    path = tmp_path / "last.pt"

    def rank(communicator, _):
        engine = make(communicator)
        train(engine, steps[:1])
        state = engine.state_dict()
        expected = copy.deepcopy(state)
        checkpoints = TwoPhaseCheckpoints(CPU)

        def before_update():
            slow.before_update.set()
            if waits:
                checkpoints.await_copy()

        if communicator.rank == 0:
            engine.before_update(before_update)
            checkpoints.begin(state, engine.parameter_names, path, None)
        train(engine, steps[1:], first=1)
        if communicator.rank == 0:
            slow.updated.set()
        checkpoints.finish()
        later = engine.state_dict()
        return expected, later

    expected, later = rank(LocalCommunicator(), None) if world == 1 else run_on_threads(world, rank, timeout_s=100)[0]
    found = load_checkpoint(path)
    names = list(expected["model"])
    assert not all(torch.equal(expected["model"][name], later["model"][name]) for name in names)
    # Running statistics, which the forward pass changes, are taken before it whoever waits.
    buffers = [name for name in names if "running" in name or "tracked" in name]
    assert len(buffers) > 3
    assert all(torch.equal(found["model"][name], expected["model"][name]) for name in buffers)
    assert same(found, expected) == waits
    if waits:
        save_checkpoint(tmp_path / "blocking.pt", expected)
        assert (tmp_path / "blocking.pt").read_bytes() == path.read_bytes()


def test_parameters_that_forward_passes_update_are_copied_before_the_next_step():
    """A codebook was copied while the next step updated it."""
    model = updating_nets.codebook(3)
    names = {name for name, _ in model.named_parameters()}
    engine = whole_engine(model, cross_entropy, ADAMW, LocalCommunicator(), batch=1, m=1)
    assert names - engine.parameter_names == {"2.ema"}


def same(found, expected):
    ours, theirs = ([*tensors_in([state["model"], state["optimizer"]])] for state in (found, expected))
    assert len(ours) == len(theirs) > 20
    return all(torch.equal(our, their) for our, their in zip(ours, theirs, strict=True))
