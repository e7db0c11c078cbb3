"""Forward passes through stages that are spread over ranks, without gradients.

``predict`` walks the forward actions of replica 0 in each group of ranks, in evaluation mode, and gives the output on
the rank of the last stage; the ranks of a group predict the same microbatches in the same order. ``rehearse`` walks
those of a training step, and gives the outputs that the step will have.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from parallel.engine.rank_program import RankProgram
from parallel.engine.step import Microbatch, Observer, StepBatches, measured, microbatch_seed
from parallel.graph.layers import RANDOM_STATE
from parallel.schedule.action import Action, Kind
from parallel.streaming.box_sums import BoxSums, Sums
from parallel.trace.stage_module import as_tensor

PREDICTION, REHEARSAL = (False, False), (True, False)
"""Whether a forward pass is one of training, and whether gradients follow it."""

Outputs = list[tuple[int, Tensor, Tensor]]
"""Microbatch, what the model gives for it, and its targets."""


def predict(work: RankProgram, microbatch: Microbatch, sums: Sums | None = None) -> Any:
    """Return the output of the model in float32 on the rank of the last stage, or ``sums`` of it and the targets; None
    on the others."""
    output, shape = None, microbatch.shape
    for action in work.prediction:
        match action.kind:
            case Kind.RECEIVE_FORWARD:
                work.transfers.recv_forward(action, shape, *PREDICTION)
            case Kind.SEND_FORWARD:
                work.transfers.send_forward(action, shape, *PREDICTION)
            case _:
                outputs, module = _forward(work, action, microbatch, sums), work.stages[action.stage].module
                if action.stage == work.mesh.stages - 1 and module.counts:
                    (output,) = outputs.values()
                    if sums is None or not module.gives_sums:
                        output = tree_map(lambda leaf: leaf.float() if isinstance(leaf, Tensor) else leaf, output)
                        output = measured(output, microbatch, sums)
    work.messenger.finish()
    return output


def rehearse(
    work: RankProgram, actions: Iterable[Action], feed: StepBatches, seed: tuple[int, int], observer: Observer | None
) -> Outputs:
    """Return the outputs of the microbatches whose loss this rank computes, as a training step will have them.

    Args:
        actions: of the step, on this rank.
        seed: of the run, and number of the step.
        observer: is notified of every forward pass.
    """
    found: Outputs = []
    for stage in work.stages.values():
        stage.module.train()
        stage.statistics.begin_step(work.m)
    for position, action in enumerate(actions):
        if action.kind is Kind.RECEIVE_FORWARD:
            work.transfers.recv_forward(action, feed.shape(action.i), *REHEARSAL)
        elif action.kind is Kind.SEND_FORWARD:
            work.transfers.send_forward(action, feed.shape(action.i), *REHEARSAL)
        elif action.kind is Kind.FORWARD:
            i, stage, shape = action.i, work.stages[action.stage], feed.shape(action.i)
            if observer:
                observer.at(position, True, f"tiles {shape}")
            values = work.transfers.wait_forward(action, gradients=False)
            if action.stage == 0:
                values[work.inputs] = stage.module.tiles(feed.images(i), shape)
            random = values.pop(RANDOM_STATE, None)
            outputs = stage.rehearse(values, microbatch_seed(*seed, i) if random is None else random, shape)
            work.transfers.stash_output(action, outputs, *REHEARSAL)
            if action.stage == work.mesh.stages - 1 and stage.module.counts:
                found.append((i, outputs[stage.module.outputs[0]], as_tensor(feed.targets(i))))
    work.messenger.finish()
    return found


def _forward(work: RankProgram, action: Action, microbatch: Microbatch, sums: Sums | None) -> dict[str, Any]:
    stage = work.stages[action.stage]
    stage.module.eval()
    values = work.transfers.wait_forward(action, gradients=False)
    if action.stage == 0:
        assert microbatch.images is not None
        values[work.inputs] = stage.module.tiles(microbatch.images, microbatch.shape)
    box_sums = None
    if sums is not None and action.stage == work.mesh.stages - 1 and stage.module.gives_sums:
        assert microbatch.targets is not None
        box_sums = BoxSums(sums, microbatch.targets)
    outputs = stage.predict(values, box_sums, microbatch.shape)
    work.transfers.stash_output(action, outputs, *PREDICTION)
    return outputs
