"""The one message of a failed run: what it names, what it marks, and that only one rank gives it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from app.launch.progress_record import report_first
from parallel.schedule.action import Action, Schedule
from parallel.schedule.text import describe_action, describe_fault, format_grid


def parse(*ranks: str) -> Schedule:
    return {rank: [Action.parse(text) for text in line.split()] for rank, line in enumerate(ranks)}


TWO_RANKS = parse("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
TWO_REPLICAS = parse("0F0 1:1F0 1:1B0 0B0", "1F0 1B0 1:0F0 1:0B0")


def test_message_names_everything_and_marks_the_cell() -> None:
    message = describe_fault(TWO_RANKS, 1, 2, 16, "inputs (2, 256, 64, 64) float32", "was killed (signal 9)", "Look.")
    first, second, *grid = message.splitlines()
    assert first == (
        "rank 1 was killed (signal 9) at step 17 in 1F1: forward pass of microbatch 1 through stage 1, "
        "inputs (2, 256, 64, 64) float32"
    )
    assert second == "Look."
    assert "\n".join(grid) == format_grid(TWO_RANKS, mark=(1, 2), around=4)
    assert sum(line.count(">>1F1<<") for line in grid) == 1


@pytest.mark.parametrize("position", [None, -1, -2])
def test_between_actions_says_so_and_has_no_grid(position: int | None) -> None:
    assert describe_fault(TWO_RANKS, 0, position, 3, "", "died") == "rank 0 died at step 4, between actions"


def test_without_a_schedule_only_the_step_is_known() -> None:
    assert describe_fault(None, 3, -1, 0, "", "died") == "rank 3 died at step 1"
    assert describe_fault(None, 3, 7, 0, "", "died") == "rank 3 died at step 1"
    assert describe_fault(TWO_RANKS, 1, -2, -1, "", "died") == "rank 1 died before the first step"


def test_replicas_are_named_where_there_are_two() -> None:
    message = describe_fault(TWO_REPLICAS, 0, 0, 0, "", "died")
    assert "in 0F0: forward pass of microbatch 0 through stage 0 of replica 0\n" in message
    message = describe_fault(TWO_REPLICAS, 0, 2, 0, "", "died")
    assert "in 1:1B0: backward pass of microbatch 0 through stage 1 of replica 1\n" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("2F3", "forward pass of microbatch 3 through stage 2"),
        ("2I3", "backward pass of microbatch 3 through stage 2, gradients of its inputs"),
        ("2W3", "backward pass of microbatch 3 through stage 2, gradients of its parameters"),
        ("2R3", "second forward pass of microbatch 3 through stage 2, to recompute what it saves"),
        ("2SEND_F3>4", "sending what stage 2 made of microbatch 3 to stage 4"),
        ("4RECV_F3<2", "receiving what stage 2 made of microbatch 3 for stage 4"),
        ("4SEND_B3>2", "sending gradients of microbatch 3 from stage 4 back to stage 2"),
        ("2RECV_B3<4", "receiving gradients of microbatch 3 from stage 4 for stage 2"),
        ("1:2REDUCE", "summing the gradients of stage 2 of replica 1 over the ranks that hold a copy of it"),
    ],
)
def test_action_in_words(text: str, words: str) -> None:
    assert describe_action(Action.parse(text)) == words


def test_one_of_many_speaks(tmp_path: Path) -> None:
    file = tmp_path / "fault.txt"
    with ThreadPoolExecutor(8) as threads:
        first = list(threads.map(lambda rank: report_first(f"rank {rank}", file), range(32)))
    assert first.count(True) == 1
    assert file.read_text() == f"rank {first.index(True)}\n"


def test_message_survives_a_folder_that_is_gone(tmp_path: Path) -> None:
    assert report_first("rank 0", tmp_path / "gone" / "fault.txt")
    assert report_first("rank 0", None)
