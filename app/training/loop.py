"""The training loop: stream -> engine.step -> metrics -> checkpoint.

Takes a ``Session`` and its run folder; returns an ``Outcome``. Nothing here knows the strategy: another engine is
swapped in where the session is built.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import time
from typing import Any

import torch

from app.checkpoint.file import keep_as, not_resumable, random_state, resume_state, set_random_state
from app.checkpoint.periodic import CheckpointManager
from app.launch.watchdog import Interrupt
from app.settings.cli import RunError
from app.settings.fields import flat
from app.training.metrics_log import MetricsLog, MlflowLog
from app.training.outcome import JUDGED_FROM, WARM_UP, IdleTime, MemoryLimit, Outcome, Throughput
from app.training.progress import RunProgress
from app.training.resharing import Resharing
from app.training.run_folder import RunFolder
from app.training.session import Session
from app.training.share import share
from app.training.steps import TrainLoader, steps_of
from app.training.validation import evaluate
from parallel.engine.optimizer_step import averages_of
from parallel.engine.recorded import DeviceClock
from parallel.engine.step import NonFiniteLoss, StepResult
from parallel.strategy import DELAYED
from pipelines.catalog.table import listed
from pipelines.stream.batch import Batch

log = logging.getLogger(__name__)
PROGRESS = ("step", "images", "replaced", "loss", "metrics", "validation", "best", "stale")
"""What a checkpoint says of the steps so far."""


class TrainingLoop:
    """Trains a session to its last step, or to a signal.

    Attributes:
        outcome: where the run stands.
        memory: what its tensors take, against the limit.
        mlflow: log of the first rank, where requested; to be closed at the end of the run.
        repeated: steps done before, after the checkpoint that this run continues; known to the first rank alone.
    """

    def __init__(self, session: Session, folder: RunFolder, interrupt: Interrupt) -> None:
        self._session, self._folder, self._interrupt = session, folder, interrupt
        self._communicator = session.placement.communicator
        self.outcome = Outcome(Throughput(session.config.strategy.batch), IdleTime(self._communicator.world))
        strategy, device = session.config.strategy, session.placement.device
        stops = strategy.memory_excess == "stop"
        self.memory = MemoryLimit(strategy.memory_bytes, device, counts=not strategy.compile, stops=stops)
        state = self._restore() if session.config.resume else {}
        self._tiles = TrainLoader(session, self.memory.on_other_thread, state.get("stream"))
        shares = tuple(map(tuple, state["shares"])) if "shares" in state else None
        self._resharing = Resharing(session.strategy, self._communicator, folder, self.outcome.step, shares)
        self._reshares = self._resharing.differs_at_start
        if session.strategy.rebalanced or self._reshares:
            self.outcome.shares = self._resharing.shares
        self._check_replaced = functools.partial(
            self.outcome.check_replaced,
            folder.failed_slides,
            images=self.outcome.images,
            replaced=self.outcome.replaced,
            judged_from=min(JUDGED_FROM, session.epoch_length),
        )
        how, paths, step = session.config.checkpoint, (folder.last, folder.best), self.outcome.step
        # Of a resumed start, once it has come to a checkpoint: one that fails before changes nothing for the next.
        keep = functools.cache(lambda: folder.keep_settings(session.config) if session.config.resume else None)
        self._checkpoints = CheckpointManager(how, *paths, session.engine, device, step, keep)
        self._train = steps_of(session)
        self._checkpoint_asked = False
        self._last_batch: Batch | None = None
        experiment = session.config.mlflow if self._is_first else ""
        self.mlflow = MlflowLog(folder.path, experiment, flat(session.config)) if experiment else None
        self._log = MetricsLog(folder, step, session.dataset.classes, self.mlflow) if self._is_first else None
        self.repeated = self._log.dropped if self._log else 0

    @property
    def _is_first(self) -> bool:
        return self._communicator.rank == 0

    @property
    def is_done(self) -> bool:
        """Return whether no step and no validation follows: the last step is done, or ``--patience`` has run out."""
        total, patience = self._session.total_steps, self._session.config.score.patience
        last = self.outcome.step >= total or self.outcome.stopped_early(patience, total) is not None
        return last and not self._validation_due()

    def run(self) -> Outcome:
        """Train.

        Raises:
            RunError: a loss that is not finite (names step, slide and tile), a checkpoint that cannot be written, or
                most tiles were replaced.
        """
        outcome, total = self.outcome, self._session.total_steps
        kept = self._session.cache or contextlib.nullcontext()
        log_file = contextlib.closing(self._log) if self._log else contextlib.nullcontext()
        bar = contextlib.closing(RunProgress(total, outcome.step, quiet=not self._is_first))
        with kept, contextlib.closing(self._tiles), log_file, self._checkpoints, bar as progress:
            stop, batch, clock = False, None, DeviceClock(self._session.placement.device)
            computed = clock.mark()
            if self._validation_due():  # the signal that ended the run before came first
                progress.say(self._validate())
                self._save(at_once=True)
            ended = self.is_done
            while not ended and not stop:
                if batch is not None:
                    batch.release()
                begun_s = time.perf_counter()
                self._session.watchdog.step(outcome.step)
                if self._reshares:
                    self._tiles.reshare(self._resharing.shares, outcome.step)
                batch = self._tiles.next()
                wait_s, came = time.perf_counter() - begun_s, clock.mark()
                result = self._step(batch, outcome.step)
                # While the host waits, a GPU may still compute the step before.
                wait_s, computed = min(wait_s, *clock.durations([(computed, came)])), clock.mark()
                step_s = time.perf_counter() - begun_s
                stop = self._finish_step(result, self._tiles.replaced(batch), step_s, wait_s)
                self._check_replaced()
                self._checkpoints.add_step(step_s)
                progress.step(outcome.step, result.loss, self._session.config.strategy.batch / step_s)
                validates = self._validation_due()
                if validates and not stop:
                    progress.say(self._validate())
                ended = self.is_done
                if stop or validates or self._checkpoint_asked or outcome.step == total:
                    self._save(at_once=stop or ended)
                outcome.throughput.rest_s.append(time.perf_counter() - begun_s - step_s)
            self._checkpoints.finish()
            if not stop:
                outcome.check_replaced(self._folder.failed_slides)
            if not ended:
                outcome.status = "interrupted"
            elif self._session.config.twin_steps:
                self._last_batch = batch
        return outcome

    def _step(self, batch: Batch, step: int) -> StepResult:
        session = self._session
        try:
            held = itertools.chain(session.engine.on_device(), self._tiles.held())
            microbatches, rate = functools.partial(self._tiles.microbatches, batch), session.learning_rate(step)
            with self.memory.watching(held):
                result = self._train(microbatches, step, rate)
        except NonFiniteLoss as fault:
            raise RunError(session.name_tiles(step, fault)) from fault
        session.watchdog.rest()
        return result

    def _finish_step(self, result: StepResult, replaced: int, step_s: float, wait_s: float) -> bool:
        """Count the step on all ranks; True when any of them was asked to stop. The first says whether to save."""
        outcome = self.outcome
        due = self._is_first and self._checkpoints.due(outcome.step + 1)
        own = [int(self._interrupt.requested), result.tiles, int(due), replaced, int(self._tiles.needs_sync)]
        votes = torch.zeros(len(own) + self._communicator.world, dtype=torch.int64)
        votes[: len(own)] = torch.tensor(own)
        votes[len(own) + self._communicator.rank] = IdleTime.to_microseconds(result.waited_s)
        self._communicator.all_reduce(votes)
        outcome.idle.add(votes[len(own) :].tolist(), step_s)
        if self._log:
            self._log.step(outcome.step + 1, outcome.images + int(votes[1]), result, step_s, wait_s, self._session)
        outcome.step += 1
        outcome.images += int(votes[1])
        outcome.replaced += int(votes[3])
        outcome.loss = result.loss
        outcome.throughput.add(step_s, wait_s)
        self._checkpoint_asked = bool(votes[2])
        self._tiles.sync_next(bool(votes[4]))
        self._reshares = self._resharing.after(outcome.step, result)
        if self._reshares:
            outcome.shares = self._resharing.shares
        return bool(votes[0])

    def _validation_due(self) -> bool:
        session, step = self._session, self.outcome.step
        if not step or not len(session.validation_rows) or self.outcome.validation.get("step", 0) == step:
            return False
        every = session.config.score.validate_every
        epoch_ends = session.epoch_of(step) > session.epoch_of(step - 1)
        return step == session.total_steps or (step % every == 0 if every else epoch_ends)

    def _validate(self) -> str:
        """Score the validation tiles; a line about it."""
        session, outcome = self._session, self.outcome
        with session.engine.averaged():
            scores = evaluate(session, outcome.step)
        outcome.metrics = scores.metrics
        counts = {"tiles": scores.tiles, "unreadable": scores.unreadable, "unscored": scores.unscored}
        outcome.validation = {"step": outcome.step, **counts}
        outcome.examples = scores.examples
        metric = scores.criterion if outcome.best is None else outcome.best["metric"]
        # Ranks that end at different steps would wait for each other.
        better = share(self._communicator, lambda: scores.better_than(outcome.best))
        outcome.stale = 0 if better else outcome.stale + 1
        if better:
            outcome.best = {"step": outcome.step, "metric": metric, "value": scores.metrics[metric]}
        if self._log:
            self._log.validation(outcome.step, scores)
        named = scores.metrics.items()
        if session.config.index.whole_pictures:  # of which each is one tile, and no slide
            named = {k.replace("slide_", "picture_"): v for k, v in named if not k.startswith("tile_")}.items()
        figures = "  ".join(f"{name} {'-' if v is None else format(v, '.4f')}" for name, v in named)
        left_out = f"; {scores.unreadable} of {scores.tiles} tiles cannot be read" if scores.unreadable else ""
        if scores.unscored:
            left_out += f", and slides without a score are {listed(scores.unscored)}"
        return f"validation at step {outcome.step}: {figures}{left_out}"

    def _save(self, at_once: bool) -> None:
        """Write the last checkpoint, and name it the best when it is. Every rank contributes its state."""
        begun_s, outcome = time.monotonic(), self.outcome
        state = self._session.engine.state_dict()
        if self._is_first:
            session, target = self._session, self._session.dataset.stain_target
            state |= {name: getattr(outcome, name) for name in PROGRESS}
            state |= {
                "stream": self._tiles.state(outcome.step),
                "random": random_state(session.placement.device),
                "classes": list(session.dataset.classes),
                "task": session.dataset.task,
                "settings": flat(session.config),
                "numbers": self._numbers,
                "stain_target": target and list(target.numbers),
                "normalisation": [list(values) for values in session.model.normalisation],
                "slides": session.slides,
                "shares": [list(share) for share in self._resharing.shares],
            }
            if averages := averages_of(state):
                state["average"] = averages  # the optimizer's own tensors, under their names: no byte more
        self._checkpoints.save(state, outcome.step, begun_s, best=self._is_best, at_once=at_once)

    @property
    def _is_best(self) -> bool:
        return self.outcome.best is not None and self.outcome.best["step"] == self.outcome.step

    def _restore(self) -> dict[str, Any]:
        """Take over the last checkpoint, and return it."""
        state = resume_state(self._folder.last, self._folder.best)
        try:
            self._take_over(state)
        except (KeyError, TypeError, AttributeError, IndexError, RuntimeError) as fault:
            if isinstance(fault, RuntimeError) and "state_dict" not in str(fault):  # of the ranks, or of memory
                raise
            raise not_resumable(self._folder.last, fault) from fault
        return state

    def _take_over(self, state: dict[str, Any]) -> None:
        if missing := [name for name in ("model", "optimizer", "random", "stream", *PROGRESS) if name not in state]:
            raise KeyError(*missing)
        first: int = share(self._communicator, lambda: state["step"])
        if state["step"] != first:
            raise RunError(
                f"{self._folder.last} is of step {state['step']} on rank {self._communicator.rank} and of step {first} "
                "on rank 0: their hosts see different files; wait for the file server, then start again with --resume"
            )
        settings, config, now = state["settings"], self._session.config, self._session.total_steps
        before = self._session.steps_of(settings["steps"], settings["epochs"])
        if (settings["steps"], settings["epochs"]) != (config.steps, config.epochs) and before > now:
            raise RunError(f"--extend makes a run longer, not shorter: it has {before} steps, asked are {now}")
        if state["classes"] != (classes := list(self._session.dataset.classes)):
            text = f"{self._folder.last} has classes {', '.join(state['classes'])}; now there are {', '.join(classes)}"
            raise RunError(f"{text}: restore the labels, or start another run with another --out")
        given = [list(values) for values in self._session.model.normalisation]
        if (trained := state.get("normalisation", given)) != given:
            text = f"{self._folder.last} takes images normalised by {trained}; the weights now expect {given}"
            raise RunError(f"{text}: give the file that the run was begun with")
        self._session.engine.load_state_dict(state)
        set_random_state(state["random"], self._session.placement.device)
        for name in PROGRESS:
            setattr(self.outcome, name, state[name])
        if self._is_first:
            self._warn_of_changes(state)
            if self._is_best:
                keep_as(self._folder.last, self._folder.best)  # the run may have been killed before it could

    @property
    def _numbers(self) -> dict[str, Any]:
        """Return the settings that change the numbers of a run, and may differ when it is resumed."""
        session, rule = self._session, self._session.strategy.pushes
        rule = None if rule is None or rule.replayed else rule  # a replay has the rates of its log
        return {
            "precision": session.placement.precision,
            "microbatches": len(session.ranges),
            "gradients": DELAYED if session.strategy.delayed else "of the step",
            "workers": self._communicator.world if rule and not rule.by_staleness else None,
            "staleness": rule and rule.staleness,
            "push_rate": rule and ("staleness" if rule.by_staleness else "workers"),
        }

    def _warn_of_changes(self, state: dict[str, Any]) -> None:
        """Warn where the steps that follow are not those of a run that was never interrupted."""
        session, step = self._session, self.outcome.step
        reasons = {
            "precision": "it rounds otherwise",
            "microbatches": "batch norm and dropout look at other groups of tiles",
            "gradients": "updates are others",
            "workers": "the learning rate of an update is --lr divided by the workers",
            "staleness": "gradients are of other parameters",
            "push_rate": "updates have other learning rates",
        }
        text = "%s %s from step %d on, %s before: %s, so the numbers are not those of an uninterrupted run"
        for name, now in self._numbers.items():
            before = state.get("numbers", {}).get(name)
            if None not in (before, now) and before != now:
                log.warning(text, name, now, step + 1, before, reasons[name])
        before, now = session.steps_of(state["settings"]["steps"], state["settings"]["epochs"]), session.total_steps
        if before != now:
            rates = session.learning_rate(step), session.learning_rate(step, before)
            text = "the run ends at step %d instead of %d: the learning rate of step %d is %.3g instead of %.3g"
            log.warning(text, now, before, step + 1, *rates)

    @property
    def measures_twin(self) -> bool:
        """Return whether steps from memory are to be measured: the run has come to its end here."""
        return self._last_batch is not None

    def measure_twin(self) -> float | None:
        """Repeat the last step on its batch, held in memory, and return the images per second. Runs when all else is
        on the disk: it changes parameters that are no longer used."""
        assert self._last_batch is not None
        twin = Throughput(self._session.config.strategy.batch)
        with contextlib.closing(self._tiles):
            self._tiles.keep(self._last_batch)
            for k in range(self._session.config.twin_steps + WARM_UP):
                begun_s = time.perf_counter()
                self._step(self._tiles.next(), self.outcome.step + k)
                twin.add(time.perf_counter() - begun_s, 0.0)
        return twin.images_per_second
