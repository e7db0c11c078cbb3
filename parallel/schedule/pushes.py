"""Pushes of asynchronous SGD: what each is, how a parameter server treats them, and their log.

The log says which gradients were applied in which order, to which version of the parameters: all to repeat a run.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from typing import NamedTuple


class Push(NamedTuple):
    """One update of the parameters.

    Attributes:
        step: of the training loop, from 0; all workers have the same parameters when it begins and when it ends.
        push: number within the step, from 0: the version of the parameters that it updates.
        worker: rank that computed the gradient.
        minibatch: of the step.
        pulled: version of the parameters that the gradient belongs to.
        staleness: updates between ``pulled`` and this one.
        learning_rate: of this update.
    """

    step: int
    push: int
    worker: int
    minibatch: int
    pulled: int
    staleness: int
    learning_rate: float


@dataclass(frozen=True, slots=True)
class PushRule:
    """Rule by which the server treats pushes.

    Attributes:
        staleness: minibatches that a worker may be ahead of the slowest, S. 0: rounds, whose pushes all belong to the
            parameters from before the round.
        by_staleness: the learning rate of a push is divided by 1 + its staleness (Zhang et al. 2016), instead of by W.
        replayed: pushes of an earlier run, in order, to apply in place of those that arrive; one worker computes them.
    """

    staleness: int = 4
    by_staleness: bool = False
    replayed: tuple[Push, ...] = ()


def read_pushes(text: str) -> tuple[Push, ...]:
    """Return the pushes of a log, a CSV file with the fields of ``Push`` as columns.

    Raises:
        ValueError: other columns, what is not a number, or a push that stands out of order or pulled a later version.
    """
    head, *rows = [row for row in csv.reader(io.StringIO(text)) if row] or [[]]
    if tuple(head) != Push._fields:
        raise ValueError(f"its first line is {','.join(Push._fields)}; got {','.join(head) or 'nothing'}")
    pushes: list[Push] = []
    for row in rows:
        try:
            step, number, worker, minibatch, pulled, staleness = map(int, row[:-1])
            push = Push(step, number, worker, minibatch, pulled, staleness, float(row[-1]))
        except ValueError:
            raise ValueError(f"a line is {len(head)} numbers, {', '.join(head)}; got {','.join(row)}") from None
        last = pushes[-1] if pushes else Push(-1, -1, 0, 0, 0, 0, 0.0)
        follows = (push.step, push.push) in ((last.step, last.push + 1), (last.step + 1, 0))
        if not follows or not 0 <= push.pulled <= push.push:
            raise ValueError(f"pushes are logged in order, from step 0 on, after what they pulled; got {','.join(row)}")
        pushes.append(push)
    if not pushes:
        raise ValueError("it has no pushes")
    return tuple(pushes)
