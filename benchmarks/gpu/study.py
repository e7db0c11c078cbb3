"""The published study of CPU offload: parameters are copied to the device before each iteration, and back after it.

Takes seconds and sizes; gives a row per model and approach: seconds of training, and of copies to the device (CtoG) and
back (GtoC). Approaches start from the same weights, see the same pictures of noise and take turns, iteration by
iteration; a row fails if its losses are not those of ``none``. ``overlap`` is ``--offload-state=parameters``. Exit
code 1: a row failed.

    python -m benchmarks.gpu.study [--iterations 160] [--seconds S] [--px N] [--batch N] [--models vgg19 ...] [--write]
"""

from __future__ import annotations

import copy
import functools
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu import naive, report
from benchmarks.gpu.copy_clock import CopyClock
from benchmarks.gpu.setting import Row, Setting, attempt, shown
from benchmarks.results import finish, parser_of, publish, results, write_json
from benchmarks.timing import clocked
from benchmarks.whole_engine import whole_engine
from models.registry import build_model
from parallel.comm.thread_comm import LocalCommunicator
from parallel.engine.step import Microbatch, microbatch_seed
from parallel.memory.policy import ActivationPolicy
from parallel.profile.cache import keep_freed_memory
from parallel.profile.gpu import set_tf32

PUBLISHED_APPROACHES = ("none", *naive.WAYS)
PUBLISHED = {
    "vgg19": (139_578_434, (30.07, 150.51, 166.72, 153.98, 161.00)),
    "alexnet": (57_012_034, (24.13, 42.21, 47.44, 41.51, 47.55)),
    "resnet50": (23_512_130, (26.17, 113.58, 110.10, 113.60, 109.37)),
    "inception_v3": (24_348_900, (32.22, 124.28, 120.24, 123.14, 119.26)),
}
"""Model -> parameters, and seconds of 20 epochs on a V100 in each of ``PUBLISHED_APPROACHES``."""
SCRIPTS = (*PUBLISHED_APPROACHES, "flattened")
INCEPTION, INCEPTION_PX = "benchmarks.exactness.models:inception_v3", 299
"""With its auxiliary head, which the registry's has not, and the least side that this head takes."""
HEAD_WEIGHT, LEARNING_RATE, MOMENTUM = 0.4, 0.001, 0.9
ITERATIONS, EPOCH, DROPPED = 160, 8, 5
"""Of the study: all, those of an epoch, and first ones that are not counted."""
LEAST, WAITING = 7, 3
"""Iterations, however long they take, and further ones in which the host waits for a GPU before and after each copy."""
GPU_ERROR = 1e-3
"""Of a loss, relative: ``overlap`` updates on the host, which rounds otherwise. On a CPU losses are equal."""
DIRECTIONS = {"CtoG": "back", "GtoC": "out"}
"""The study's name -> ours."""
STATISTICS: dict[str, Callable[[list[float]], float]] = {"mean": statistics.mean, "median": statistics.median}
STATISTICS |= {"min": min, "max": max}
HEADER = ("model", "approach", "iterations", "total, s", "over none", "published")
HEADER += tuple(f"{way}, ms: {', '.join(STATISTICS)}" for way in DIRECTIONS)
HEADER += (*(f"{way} after waiting, ms" for way in DIRECTIONS), *(f"{way}, GB/s" for way in DIRECTIONS))

Seconds = dict[str, float]
"""Of an iteration: "total", and of its copies by the study's name of a direction."""


class Script:
    """A plain loop of torch. Its model is on the device: throughout, or with an offload of ``naive`` during a step."""

    def __init__(self, module: nn.Module, approach: str, setting: Setting) -> None:
        self._setting, self._module, self._losses = setting, module, list[Tensor]()
        self._optimizer = make_optimizer(module.parameters())
        state = [*module.parameters(), *module.buffers()]
        self.bytes = dict.fromkeys(DIRECTIONS, sum(tensor.nbytes for tensor in state))
        self._offload = None if approach == "none" else naive.offload(approach, state, setting.device)
        if approach == "none":
            module.to(setting.device)

    @property
    def losses(self) -> list[float]:
        return torch.stack(self._losses).tolist()  # type: ignore[no-any-return]

    def iterate(self, images: Tensor, labels: Tensor, *, waiting: bool = False) -> Seconds:
        seconds_of = self._setting.seconds_of if waiting else lambda call: clocked(call).wall
        found, begun_s = Seconds(), time.perf_counter()
        if self._offload:
            found["CtoG"] = seconds_of(self._offload.to_device)
        self._step(images, labels)
        if self._offload:
            found["GtoC"] = seconds_of(self._offload.to_host)
        self._setting.settle()
        return found | {"total": time.perf_counter() - begun_s}

    def _step(self, images: Tensor, labels: Tensor) -> None:
        torch.manual_seed(microbatch_seed(0, len(self._losses), 0))  # of an engine's dropout
        loss = loss_of(self._module(images), labels)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._losses.append(loss.detach())


class Overlapped:
    """The project's engine with parameters on the host. Its copies are timed, by events, in waiting iterations only."""

    def __init__(self, module: nn.Module, shape: tuple[int, ...], setting: Setting) -> None:
        self._setting, self.losses, self.bytes = setting, list[float](), dict[str, int]()
        sizes: Any = {"batch": shape[0], "m": 1, "shape": shape, "device": setting.device}
        policy = ActivationPolicy(parameters=True)
        self._engine = whole_engine(module, loss_of, make_optimizer, LocalCommunicator(), **sizes, policy=policy)
        saved_tensors = self._engine._work.stages[0]._saved_tensors
        assert saved_tensors is not None
        self._clock = CopyClock(saved_tensors.copies)

    def iterate(self, images: Tensor, labels: Tensor, *, waiting: bool = False) -> Seconds:
        self._clock.times.clear()
        self._clock.on = waiting
        microbatch, begun_s = Microbatch(images, labels, tuple(images.shape)), time.perf_counter()
        self.losses.append(self._engine.step([microbatch], len(self.losses), LEARNING_RATE).loss)
        self._setting.settle()
        found = {"total": time.perf_counter() - begun_s}
        for way, direction in DIRECTIONS.items() if waiting else ():
            copies = [each for each in self._clock.times if each.direction == direction]
            found[way], self.bytes[way] = sum(c.seconds for c in copies), sum(c.bytes for c in copies)
        return found


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)


def loss_of(outputs: Tensor | tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    if isinstance(outputs, Tensor):
        return F.cross_entropy(outputs, labels)
    return F.cross_entropy(outputs[0], labels) + HEAD_WEIGHT * F.cross_entropy(outputs[1], labels)


def build(model: str) -> nn.Module:
    """Return a model of torchvision for two classes, which has as many parameters as the published one."""
    module = build_model(INCEPTION if model == "inception_v3" else f"torchvision:{model}", classes=2)
    count = sum(parameter.numel() for parameter in module.parameters())
    assert model not in PUBLISHED or count == PUBLISHED[model][0], f"{model} has {count} parameters"
    return module


def measure(setting: Setting, model: str, iterations: int, px: int, batch: int) -> list[Row]:
    """Return a row per approach. No further iteration begins once the time of ``setting`` is over."""
    px = max(px, INCEPTION_PX) if model == "inception_v3" else px
    torch.manual_seed(0)
    module, labels = build(model), torch.arange(batch) % 2
    noise = [torch.randn(batch, 3, px, px) + labels.view(-1, 1, 1, 1) for _ in range(EPOCH)]  # one class is brighter
    batches = [(images.to(setting.device), labels.to(setting.device)) for images in noise]
    learners: dict[str, Script | Overlapped] = {n: Script(copy.deepcopy(module), n, setting) for n in SCRIPTS}
    learners["overlap"] = Overlapped(module, (batch, 3, px, px), setting)
    done: dict[str, list[Seconds]] = defaultdict(list)
    turns = 0
    while turns < iterations and (turns < LEAST or setting.left_s > 0):
        for name, learner in learners.items():
            done[name].append(learner.iterate(*batches[turns % EPOCH]))
        turns += 1
    counted = slice(min(DROPPED, turns - 1), None)
    none_s = sum(each["total"] for each in done["none"][counted])
    found: list[Row] = []
    for name, learner in learners.items():
        waiting = [learner.iterate(*batches[turn % EPOCH], waiting=True) for turn in range(WAITING)]
        total_s = sum(each["total"] for each in done[name][counted])
        row = {"name": f"{model} {name}", "model": model, "approach": name, "px": px, "batch": batch}
        row |= {"iterations": turns - counted.start, "total_s": total_s, "over_none": total_s / none_s}
        for way in DIRECTIONS:
            waited = [each[way] for each in waiting if way in each]
            seconds = [each[way] for each in done[name][counted] if way in each] or waited
            row[way] = {key: of(seconds) for key, of in STATISTICS.items()} if seconds else None
            row[f"{way}_waited_s"] = statistics.median(setting.of(waited, seconds)) if waited else None
            row[f"{way}_bytes"] = learner.bytes[way] if waited else 0
        row["losses"], expected = learner.losses, learners["none"].losses
        row["passed"] = all(
            abs(ours - theirs) <= setting.of(GPU_ERROR, 0.0) * abs(theirs)
            for ours, theirs in zip(learner.losses, expected, strict=True)
        )
        found.append(row)
    return found


def published_ratio(model: str, approach: str, base: str) -> float | None:
    """Return the published seconds of ``approach`` over those of ``base``; None for what was not published."""
    if model not in PUBLISHED or approach not in PUBLISHED_APPROACHES:
        return None
    seconds = dict(zip(PUBLISHED_APPROACHES, PUBLISHED[model][1], strict=True))
    return seconds[approach] / seconds[base]


def rows(setting: Setting) -> Iterator[Row]:
    models, iterations = setting.of((tuple(PUBLISHED), ITERATIONS), (("squeezenet1_1",), LEAST))
    yield from measured(setting, models, iterations, *setting.of((224, 32), (64, 4)))


def measured(setting: Setting, models: Sequence[str], *sizes: int) -> Iterator[Row]:
    """Yield the rows of ``models``, each with an equal share of the time; ``sizes``: iterations, px, batch."""
    torch.backends.cudnn.deterministic = True
    for part, model in setting.shared(models):
        run = functools.partial(measure, part, model, *sizes)
        found = attempt({"model": model}, lambda run=run: {"rows": run()})  # type: ignore[misc]
        yield from found.get("rows", [found])


def line(row: Row) -> tuple[str, ...]:
    copied = [way for way in DIRECTIONS if row[way]]
    ms = {way: ", ".join(shown(value, 1e-3, 1) for value in row[way].values()) for way in copied}
    waited = {way: shown(row[f"{way}_waited_s"], 1e-3, 1) for way in copied}
    rate = {way: shown(row[f"{way}_bytes"] / row[f"{way}_waited_s"], 1e9, 1) for way in copied}
    return (
        f"{row['model']}, {row['batch']} x {row['px']} px",
        *(str(row[key]) for key in ("approach", "iterations")),
        *(shown(row[key], 1, 2) for key in ("total_s", "over_none")),
        shown(published_ratio(row["model"], row["approach"], "none"), 1, 2),
        *(column.get(way, "-") for column in (ms, waited, rate) for way in DIRECTIONS),
    )


TAKEAWAYS = {
    "pinned": (
        "Pinning costs time for few large tensors (VGG19, AlexNet), and saves some for ResNet-50 and InceptionV3.",
        "a CPU shows what the copy into pinned memory costs, not what the link gains.",
    ),
    "nonblocking": (
        "Non-blocking copies alone change little.",
        "on a CPU they are those of `naive`, and the difference is noise.",
    ),
    "flattened": (
        "Fewer and denser tensors are copied faster; `flattened` has one.",
        "a CPU shows what calls and allocations cost, and no link.",
    ),
}
"""Approach -> what the study concluded, and what a CPU shows of it."""


def takeaways(found: Sequence[Row], gpu: bool) -> str:
    """Return the conclusions of the study, one by one, and what ``found`` says to each."""
    by_name = {(row["model"], row["approach"]): row for row in found}
    lines = []
    for approach, (said, limit) in TAKEAWAYS.items():
        ratios = []
        for model in dict.fromkeys(row["model"] for row in found):
            row, base = by_name[model, approach], by_name[model, "naive"]
            copies = [sum(each[f"{way}_waited_s"] for way in DIRECTIONS) for each in (row, base)]
            ratio, published = row["total_s"] / base["total_s"], published_ratio(model, approach, "naive")
            more = "" if published is None else f", published {published:.2f}"
            ratios.append(f"{model} {ratio:.2f} (copies {copies[0] / copies[1]:.2f}{more})")
        lines.append(f"{said} Over `naive`: {'; '.join(ratios)}." + ("" if gpu else f" Not measured on a GPU: {limit}"))
    groups = naive.WAYS, ("overlap",)
    costs, own = ([row["over_none"] for row in found if row["approach"] in names] for names in groups)
    said = f"Here by {min(costs):.2f} to {max(costs):.2f}, and `overlap` by {min(own):.2f} to {max(own):.2f}."
    limit = "" if gpu else " Not measured on a GPU: the ratio depends on the time of a step beside its copies."
    lines.append(f"Offload multiplies training time by 1.7 to 5.5. {said}{limit}")
    return "".join(f"{number}. {line}\n" for number, line in enumerate(lines, 1))


def main() -> None:
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    gpu = device.type == "cuda"
    parser = parser_of(__doc__)
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help=f"the first {DROPPED} are not counted")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of all models; later none begins")
    parser.add_argument("--px", type=int, default=224 if gpu else 64, help=f"inception_v3: at least {INCEPTION_PX}")
    parser.add_argument("--batch", type=int, default=32 if gpu else 2)
    parser.add_argument("--models", nargs="+", default=list(PUBLISHED), help="names in torchvision")
    asked = parser.parse_args()
    keep_freed_memory()
    set_tf32(False)
    setting = Setting(device, time.perf_counter() + asked.seconds)
    found = list(measured(setting, asked.models, asked.iterations, asked.px, asked.batch))
    write_json("gpu_study", found)
    good = [row for row in found if "fault" not in row]
    name = torch.cuda.get_device_name(device) if gpu else "none: a copy to the device is one within the CPU's memory"
    page = f"GPU: {name}.\n", report.table_of(found, sys.modules[__name__]), takeaways(good, gpu) if good else ""
    publish(__file__, results(*page), asked.write, "study")
    missed = [row for row in found if not row.get("passed")]
    finish(f"{row.get('name', row['model'])}: {row.get('fault', 'other losses')}" for row in missed)


if __name__ == "__main__":
    main()
