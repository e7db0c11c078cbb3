"""Report of ``app.plan``: the table of strategies on the terminal, and the files of ``--out``.

Takes the command; runs the planner. A row for each strategy, its best candidate; all that were evaluated are
in ``candidates.json``.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from app.planning.command import PlanCommand
from app.planning.explained import delayed_notes, hours_text, print_reasons, print_stages, train_line, unequal_notes
from app.planning.machine import Machine, devices_named, named_machine, this_machine
from app.planning.regions import PlannerAt, write_regions
from app.planning.table import print_largest, print_rows
from app.planning.workload import Workload
from app.settings.cli import FAILED, OK
from app.settings.fields import bytes_of
from parallel.cost.cluster import Cluster
from parallel.draw.graph_text import graph_dot, graph_json, graph_text
from parallel.draw.outline import ModelView
from parallel.draw.schedule_svg import schedule_svg
from parallel.graph.partition import Partition
from parallel.graph.scale import with_tiles
from parallel.plan.candidates import MemoryOptions
from parallel.plan.largest_tile import STEP, LargestTile, largest_tiles, steps_of
from parallel.plan.plan import PlanRow, best_of, too_small
from parallel.plan.search import Planner
from parallel.plan.stages import Task
from parallel.schedule.registry import SUBGRAPH, build_schedule
from parallel.schedule.shares import FINE
from parallel.schedule.text import to_csv
from parallel.units import bytes_text
from pipelines.catalog.table import counted

SOMETIMES = ("largest_tile.json", "map.svg", "plan.json", "schedule.csv", "schedule.svg")
"""Files of ``--out`` that not every plan has."""


def report(command: PlanCommand) -> int:
    """Plan, print, write. Exit code 1 when nothing fits.

    Raises:
        ValueError: a model, device or link that is not known, or a model that does not run on such tiles.
    """
    if command.device_spec is None:  # to measure this machine takes a minute: first refuse a model that is none
        Workload(command.model, command.tile, command.classes, command.norm, head=command.head).build()
    machine = machine_of(command)
    work = workload_of(command, machine)
    planner = planner_for(command, machine, work)
    savings, m = command.memory_options, command.microbatches
    rows = list(planner.search(command.names, ranks=command.ranks, depth=command.stages, m=m, savings=savings))
    rows = planner.tune_recompute(rows, savings)
    # Never the plan unless it is named: whether each layer takes samples apart shows when it is built.
    by_name = command.parallel == SUBGRAPH.name
    best = best_of(row for row in rows if by_name or row.strategy.name != SUBGRAPH.name)
    costs = planner.stages.microbatch(1)[1]
    error = "" if costs.expected_error is None else f", expected error of a layer {100 * costs.expected_error:.0f} %"
    print(
        f"{command.model}, {command.tile} px, {counted(command.step_tiles, 'tile')} a step, "
        f"{counted(command.ranks, 'rank')} of "
        f"{bytes_text(machine.cluster.memory_bytes)} on {machine.cluster.name}, {machine.precision}\n"
        f"times: {costs.source}{error}"
    )
    print_rows(rows, best)
    print_reasons(planner, rows, best)
    if best is not None:
        print_stages(planner, rows, best)
        if command.tiles is not None and best.step_s:
            print(f"\nhours of the plan: {hours_text(command.tiles, command.step_tiles, best.step_s)}")
        print(f"\nto train so:\n  {train_line(command, best.strategy)}")
    if note := _box_note(planner.task):
        print(f"\n{note}")
    if note := _team_note(planner, rows):
        print(note)
    if best is not None and best.strategy.stashes:
        print("\n" + "\n".join(delayed_notes(planner, best, command.tile)))
    if planner.cluster.speeds:
        print("\n" + "\n".join(_unequal(command, machine, planner, rows, work)))
    if best is None:
        print(f"\n{too_small([row for row in rows if not row.fits], machine.cluster)}")

    @functools.cache
    def planner_at(tile: int) -> Planner | None:
        if tile == command.tile:
            return planner
        try:
            return planner_for(command, machine, work.at(tile))
        except ValueError:  # the model does not run on tiles as small as this
            return None

    largest = _largest(command, machine.cluster, planner_at) if command.largest_tile else []
    if command.out:
        _write(command, machine, planner_at, rows, best, largest)
    return OK if best else FAILED


def _unequal(
    command: PlanCommand, machine: Machine, planner: Planner, rows: Sequence[PlanRow], work: Workload
) -> Iterator[str]:
    assert command.device_spec is not None
    devices = [spec.name for spec in devices_named(command.device_spec, command.ranks)]

    def without(device: str) -> float | None:
        left = [name for name in devices if name != device]
        # The precision of the plan: "auto" may choose another one for fewer devices.
        changed: dict[str, Any] = {"device_spec": ",".join(left), "ranks": len(left), "precision": machine.precision}
        fewer = dataclasses.replace(command, **changed, batch=command.step_tiles)
        others = planner_for(fewer, machine_of(fewer), work)
        # As for the plan itself, without subgraph: whether each layer takes samples apart shows when it is built.
        of_others = [name for name in command.names if name != SUBGRAPH.name] if len(left) > 1 else ["single"]
        depth, m, savings = command.stages, command.microbatches, command.memory_options
        best = best_of(others.search(of_others, ranks=len(left), depth=depth, m=m, savings=savings))
        return None if best is None else best.images_per_second

    return unequal_notes(devices, planner.cluster.speeds, rows, without)


def _box_note(task: Task) -> str:
    """Return the last layer that tiles are computed to box by box, where that is not the end of the model."""
    streamed, fault = task.in_boxes()
    if streamed is None:
        return f"not box by box: {fault}"
    ends = streamed.region.ends_at
    if not ends:
        return ""
    return f"with --stream, boxes reach up to {ends[0]}, which {ends[1]}; the rest of the model is computed whole"


def _team_note(planner: Planner, rows: Sequence[PlanRow]) -> str:
    """Return the last layer that the team of the fastest row with one divides, where that is not the end."""
    best = best_of(row for row in rows if row.strategy.grid)
    grid = best.strategy.grid if best else None
    if grid is None or planner.stages.teams is None:
        return ""
    ends = planner.stages.teams.plan(grid).ends_at
    rest = "the rest of the model is computed whole"
    return f"a team of {grid} divides tiles up to {ends[0]}, which {ends[1]}; {rest}" if ends else ""


def machine_of(command: PlanCommand) -> Machine:
    """Return the machine that the command names, or this one."""
    memory, host = bytes_of(command.memory or ""), bytes_of(command.host_memory or "")
    asked: dict[str, Any] = {"memory": memory, "host_memory": host, "precision": command.precision}
    if command.device_spec is None:
        return this_machine(command.ranks, **asked)
    asked |= {"per_node": command.per_node, "link": command.link, "network": command.network}
    return named_machine(command.device_spec, command.ranks, **asked)


def workload_of(command: PlanCommand, machine: Machine) -> Workload:
    """Return the workload that the command describes."""
    segments = None if command.task == "auto" else command.task == "segment"
    names = command.model, command.tile, command.classes, command.norm, segments, command.optimizer
    return Workload(*names, machine.autocast, command.head)


def planner_for(command: PlanCommand, machine: Machine, work: Workload) -> Planner:
    """Return a planner of the command's problem, of one tile size."""
    task = work.task(command.step_tiles, machine.estimate)
    usual = with_tiles(work.in_float32, max(1, command.step_tiles // (FINE * command.ranks)))
    return Planner(task, dataclasses.replace(machine.cluster, speeds=machine.speeds(usual)))


def _largest(command: PlanCommand, cluster: Cluster, planner_at: PlannerAt) -> list[dict[str, Any]]:
    """Print the table of largest tiles, and return what it says as data."""

    def least(tile: int, name: str, savings: MemoryOptions) -> PlanRow | None:
        if (planner := planner_at(tile)) is None:
            return None
        ranks, depth = (1, None) if name == "single" else (command.ranks, command.stages)
        return planner.smallest_memory(name, ranks, savings, depth=depth, m=command.microbatches)

    def limit(found: LargestTile) -> str:
        planner = planner_at(2 * found.tile or STEP) if found.doubled else None
        return str(planner.limit(found.doubled)) if planner and found.doubled else ""

    def timed(found: LargestTile) -> LargestTile:
        planner = planner_at(found.tile) if found.row else None
        return dataclasses.replace(found, row=planner.with_time(found.row)) if planner and found.row else found

    asked = dict.fromkeys(("single", *command.names) if command.ranks > 1 else command.names)
    found = [timed(one) for one in largest_tiles(asked, steps_of(command.memory_options), least)]
    limits = [limit(one) for one in found]
    print_largest(found, limits, cluster)
    return [
        {
            "strategy": one.name,
            "tile_px": one.tile,
            "recompute": list(one.savings.recompute),
            "offload": list(one.savings.offload),
            "row": one.row and one.row.to_json(),
            "limit_of_double": limit,
        }
        for one, limit in zip(found, limits, strict=True)
    ]


def _write(
    command: PlanCommand,
    machine: Machine,
    planner_at: PlannerAt,
    rows: Sequence[PlanRow],
    best: PlanRow | None,
    largest: Sequence[dict[str, Any]],
) -> None:
    out: Path = command.out  # type: ignore[assignment]  # asked for by the caller
    planner = planner_at(command.tile)
    assert planner is not None  # it made the rows
    out.mkdir(parents=True, exist_ok=True)
    for name in SOMETIMES:
        (out / name).unlink(missing_ok=True)
    texts = {"candidates.json": json.dumps({"rows": [row.to_json() for row in rows]}, indent=2)}
    if largest:
        texts["largest_tile.json"] = json.dumps({"rows": largest}, indent=2)
    graph, costs = planner.stages.microbatch(1)
    partition = None
    if best is not None:
        own = ("model", "norm", "head", "classes", "ranks", "optimizer", "recompute", "offload")
        problem = {name: getattr(command, name) for name in own} | {
            "tile_px": command.tile,
            "batch": command.step_tiles,
            "memory_bytes": machine.cluster.memory_bytes,
            "precision": machine.precision,
            "machine": machine.cluster.name,
        }
        texts["plan.json"] = planner.plan(problem, best).dumps()
        if best.strategy.splits:
            partition = Partition(graph, planner.partition_of(best).starts)  # of one tile, as all else of the graph
            timeline = planner.timeline(best)
            title = f"{best.strategy}: {command.model}, {command.tile} px, simulated"
            texts["schedule.svg"] = schedule_svg(timeline, title=title)
            strategy = best.strategy
            schedule = build_schedule(strategy.name, strategy.mesh, strategy.m, strategy.shares)
            texts["schedule.csv"] = to_csv(schedule)
    view = ModelView(
        graph,
        level=command.graph,
        partition=partition,
        forward_s=[cost.forward_s for cost in costs.layers],
        backward_s=[cost.backward_s for cost in costs.layers],
        title=f"{command.model}, one tile of {command.tile} px",
    )
    texts |= {"graph.dot": graph_dot(view), "graph.txt": graph_text(view)}
    texts["graph.json"] = json.dumps(graph_json(view), indent=1)
    for name, text in texts.items():
        (out / name).write_text(text)
    needed = write_regions(out, planner_at, model=command.model, tile=command.tile, ranks=command.ranks)
    print("\ntile sides in px by what is needed, with nothing recomputed or offloaded:", *needed, sep="\n  ")
    drawn = [name for name in ("map.svg", "memory.svg") if (out / name).exists()]
    print(f"\nwritten to {out}: " + ", ".join(sorted([*texts, *drawn])))
