"""``--parallel async`` as a user starts it: log, report, kill -9 and resume, replay."""

from types import SimpleNamespace

import pytest

from app.planning.auto import names_for
from app.planning.command import PlanCommand
from app.settings.strategy import StrategySettings
from app.training.loop import TrainingLoop
from app.training.metrics_log import staleness_in
from app.training.run_folder import CsvLog
from parallel.schedule.text import Push, PushRule, read_pushes
from parallel.strategy import DELAYED
from tests.app.conftest import QUICK, begin_train, checkpoint_of, rank_process, rows_of, same_weights, summary_of


@pytest.mark.process
def test_killed_and_resumed_and_replayed_from_its_log(classify_slides, train, train_ranks, tmp_path):
    """No update is lost or made twice: the log of a run that was killed replays to its last bit."""
    out, again = tmp_path / "run", tmp_path / "again"
    arguments = ("--slides", classify_slides, *QUICK, "--microbatches", "4", "--parallel", "async", "--steps", "24")
    run = (*arguments, "--out", out, "--ranks", "2", "--checkpoint-every", "3", "--shares", "3,1")
    process = begin_train(*run)
    rank_process(process, 1).kill()
    printed, _ = process.communicate(timeout=90)
    assert process.returncode == 1, printed
    assert "a rank ended with exit code 137" in printed
    assert checkpoint_of(out)["step"] < 24
    assert f"async: {DELAYED}" in train_ranks(*run, "--resume").stdout
    pushes = read_pushes((out / "pushes.csv").read_text())
    assert len(pushes) == 24 * 4
    assert {push.worker for push in pushes} == {0, 1}
    summary = summary_of(out)
    assert (summary["images"], summary["gradients"], sum(summary["staleness"].values())) == (96, DELAYED, 96)
    page = (out / "report.html").read_text()
    assert DELAYED in page
    assert "Updates by staleness" in page
    train(*arguments, "--out", again, "--ranks", "1", f"--replay={out / 'pushes.csv'}")
    assert (again / "pushes.csv").read_text() == (out / "pushes.csv").read_text()
    assert same_weights(out, again)


def test_one_rank_is_the_plain_run_bit_for_bit(classify_slides, train, tmp_path):
    common = ("--slides", classify_slides, *QUICK, "--microbatches", "1", "--steps", "3", "--parallel")
    for name in ("async", "single"):
        train(*common, name, "--out", tmp_path / name)
    assert same_weights(tmp_path / "async", tmp_path / "single")
    again = train(*common, "single", "--out", tmp_path / "async", "--resume", "--steps", "4", "--extend")
    assert f"gradients of the step from step 4 on, {DELAYED} before" in again.stderr


def test_another_number_of_workers_is_said_to_change_the_rates(caplog):
    loop = object.__new__(TrainingLoop)
    strategy, placement = SimpleNamespace(pushes=PushRule(), delayed=True), SimpleNamespace(precision="fp32")
    loop._session = SimpleNamespace(
        strategy=strategy, placement=placement, ranges=[0], steps_of=lambda *_: 4, total_steps=4
    )
    loop._communicator, loop.outcome = SimpleNamespace(world=2), SimpleNamespace(step=2)
    settings = {"settings": {"steps": 4, "epochs": None}}
    loop._warn_of_changes(settings)  # an older checkpoint
    loop._warn_of_changes(settings | {"numbers": {"workers": None, "staleness": None}})  # of ddp
    assert not caplog.messages
    loop._warn_of_changes(settings | {"numbers": {"workers": 4, "staleness": 2, "push_rate": "workers"}})
    assert [text.partition(":")[0] for text in caplog.messages] == [
        "workers 2 from step 3 on, 4 before",
        "staleness 4 from step 3 on, 2 before",
    ]


def test_no_plan_takes_it():
    assert not {"async", "pipedream"} & {*names_for(StrategySettings(ranks=2)), *PlanCommand().names}
    (fault,) = PlanCommand(parallel="async", ranks=2).validate()
    assert "--parallel async has no schedule" in fault


def test_the_log_is_cut_back_to_the_checkpoint(tmp_path):
    path = tmp_path / "pushes.csv"
    assert staleness_in(path) is None
    pushes = [Push(step, push, 0, push, 0, push, 0.1 / 3) for step in range(3) for push in range(2)]
    log = CsvLog(path, Push._fields)
    for push in pushes:
        log.add(push._asdict())
    assert read_pushes(path.read_text()) == tuple(pushes)
    assert log.cut_after(1) == 2  # two steps were done
    for push in pushes[4:]:
        log.add(push._asdict())
    assert read_pushes(path.read_text()) == tuple(pushes)
    assert staleness_in(path) == {0: 3, 1: 3}
    assert len(rows_of(path)) == 6
