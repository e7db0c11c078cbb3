"""Predictions through stages that are spread over ranks: forward passes of one microbatch, in evaluation mode.

Takes the forward actions of one replica in each group of ranks; gives the output on the rank of the last stage. The
ranks of a group predict the same microbatches in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from parallel.engine.messages import Messenger
from parallel.engine.step import Microbatch, Wants, measured
from parallel.engine.transfers import StageTransfers
from parallel.schedule.action import Action, Kind
from parallel.stage.stage import Stage
from parallel.streaming.box_sums import BoxSums, Sums


class Inference:
    """The stages of replica 0 that one rank holds.

    Args:
        actions: of this rank: forward passes of a microbatch, with their messages.
        last: number of the model's last stage.
        inputs: name of the model's input.
    """

    def __init__(
        self,
        actions: Sequence[Action],
        last: int,
        stages: Mapping[int, Stage],
        transfers: StageTransfers,
        messenger: Messenger,
        inputs: str,
    ) -> None:
        self._actions, self._last, self._inputs = actions, last, inputs
        self._stages, self._transfers, self._messenger = stages, transfers, messenger

    @property
    def wants(self) -> Wants:
        """Return images to feed the first stage, targets to hold against what the last gives."""
        held = {action.stage for action in self._actions}
        return Wants(0 in held, self._last in held)

    def run(self, microbatch: Microbatch, sums: Sums | None = None) -> Any:
        """Return the output of the model in float32 on the rank of the last stage, or ``sums`` of it and the targets;
        None on the others."""
        output, shape = None, microbatch.shape
        for action in self._actions:
            match action.kind:
                case Kind.RECEIVE_FORWARD:
                    self._transfers.recv_forward(action, shape, training=False)
                case Kind.SEND_FORWARD:
                    self._transfers.send_forward(action, shape, training=False)
                case _:
                    outputs = self._forward(action, microbatch, sums)
                    if action.stage == self._last and self._stages[action.stage].module.counts:
                        (output,) = outputs.values()
                        if sums is not None and not self._stages[action.stage].module.gives_sums:
                            output = measured(tree_map(_in_float32, output), microbatch, sums)
                        elif sums is None:
                            output = tree_map(_in_float32, output)
        self._messenger.finish()
        return output

    def _forward(self, action: Action, microbatch: Microbatch, sums: Sums | None) -> dict[str, Any]:
        stage = self._stages[action.stage]
        stage.module.eval()
        values = self._transfers.wait_forward(action, training=False)
        if action.stage == 0:
            assert microbatch.images is not None
            values[self._inputs] = stage.module.tiles(microbatch.images, microbatch.shape)
        asked = None
        if sums is not None and action.stage == self._last and stage.module.gives_sums:
            assert microbatch.targets is not None
            asked = BoxSums(sums, microbatch.targets)
        outputs = stage.predict(values, asked, microbatch.shape)
        self._transfers.stash_output(action, outputs, training=False)
        return outputs


def _in_float32(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) else leaf
