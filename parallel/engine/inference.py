"""Predictions through stages that are spread over ranks: forward passes of one microbatch, in evaluation mode.

Walks the forward actions of replica 0 in each group of ranks; gives the output on the rank of the last stage. The
ranks of a group predict the same microbatches in the same order.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from parallel.engine.rank_program import RankProgram
from parallel.engine.step import Microbatch, measured
from parallel.schedule.action import Action, Kind
from parallel.streaming.box_sums import BoxSums, Sums


def predict(work: RankProgram, microbatch: Microbatch, sums: Sums | None = None) -> Any:
    """Return the output of the model in float32 on the rank of the last stage, or ``sums`` of it and the targets; None
    on the others."""
    output, shape = None, microbatch.shape
    for action in work.prediction:
        match action.kind:
            case Kind.RECEIVE_FORWARD:
                work.transfers.recv_forward(action, shape, training=False)
            case Kind.SEND_FORWARD:
                work.transfers.send_forward(action, shape, training=False)
            case _:
                outputs, module = _forward(work, action, microbatch, sums), work.stages[action.stage].module
                if action.stage == work.mesh.stages - 1 and module.counts:
                    (output,) = outputs.values()
                    if sums is None or not module.gives_sums:
                        output = measured(tree_map(_in_float32, output), microbatch, sums)
    work.messenger.finish()
    return output


def _forward(work: RankProgram, action: Action, microbatch: Microbatch, sums: Sums | None) -> dict[str, Any]:
    stage = work.stages[action.stage]
    stage.module.eval()
    values = work.transfers.wait_forward(action, training=False)
    if action.stage == 0:
        assert microbatch.images is not None
        values[work.inputs] = stage.module.tiles(microbatch.images, microbatch.shape)
    box_sums = None
    if sums is not None and action.stage == work.mesh.stages - 1 and stage.module.gives_sums:
        assert microbatch.targets is not None
        box_sums = BoxSums(sums, microbatch.targets)
    outputs = stage.predict(values, box_sums, microbatch.shape)
    work.transfers.stash_output(action, outputs, training=False)
    return outputs


def _in_float32(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) else leaf
