"""The files of ``configs/slurm`` as batch jobs of a real Slurm of two nodes, both on this machine.

One run, made by the array job and ``train.sbatch``, is what the others are held against: the same steps over two nodes,
over MPI, split into stages, or interrupted and requeued.
"""

import json
import os
import re
import shutil
import sys
import time
from pathlib import Path

import pytest

from app.settings.launcher import first_host
from tests.app.conftest import QUICK, ROOT, losses_of, rows_of, summary_of, train_command
from tests.helpers.slurm import NODES, rank_of

pytestmark = pytest.mark.slurm

SCRIPTS = sorted((ROOT / "configs" / "slurm").glob("*.sbatch"))
RUN = (*QUICK, "--optimizer", "sgd", "--steps", "6", "--device", "cpu")
UNHURRIED = "tests.helpers.tiny_models:unhurried"
ENVIRONMENT = {
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "OMP_NUM_THREADS": "1",
    # Both nodes are this machine, and their names are Slurm's only.
    "RDZV_HOST": "127.0.0.1",
    "MASTER_ADDR": "127.0.0.1",
}


def run_job(slurm, folder, options, name, *arguments, **environment):
    """What ``sbatch [options] configs/slurm/name [arguments]`` prints; the job has to end well."""
    output = folder / f"{name}.out"
    job = slurm.submit(
        f"--output={output}",
        *options.split(),
        ROOT / "configs" / "slurm" / name,
        *arguments,
        cwd=ROOT,
        environment={**ENVIRONMENT, **environment},
    )
    state = slurm.wait(job, 240)
    assert state == "COMPLETED", output.read_text()
    return output.read_text()


def with_index(indexed, out):
    """``out``, in which the slides are indexed already."""
    out.mkdir()
    for part in indexed[0].glob("tiles.part-*.parquet"):
        shutil.copy(part, out)
    return out


@pytest.fixture(scope="module")
def indexed(slurm, classify_slides, tmp_path_factory):
    """A run folder in which the array job has indexed the slides, and what its tasks printed."""
    out = tmp_path_factory.mktemp("slurm")
    job = slurm.submit(
        "--array=1-2",
        "--cpus-per-task=1",
        f"--output={out}/index_%a.out",
        ROOT / "configs" / "slurm" / "index_array.sbatch",
        *("--slides", classify_slides, "--out", out / "run", "--tile", "256"),
        cwd=ROOT,
        environment=ENVIRONMENT,
    )
    printed = []
    for task in (1, 2):
        output = out / f"index_{task}.out"
        assert slurm.wait(f"{job}_{task}", 120) == "COMPLETED", output.read_text()
        printed.append(output.read_text())
    return out / "run", printed


@pytest.fixture(scope="module")
def trained(slurm, classify_slides, indexed):
    """The run that others are held against, and what its job printed."""
    out, _ = indexed
    arguments = ("--slides", classify_slides, "--out", out, *RUN, "--parallel", "ddp")
    return out, run_job(slurm, out.parent, "", "train.sbatch", *arguments, RANKS="2")


def test_tasks_of_an_array_index_parts_which_the_run_takes_over(indexed, trained):
    out, printed = indexed
    for task, text in enumerate(printed, 1):
        assert f"3 of them in part {task}/2\n" in text
        assert "indexed 3 slides in " in text
        assert (out / f"tiles.part-{task}-of-2.parquet").exists()
    assert f"in {out / 'tiles.parquet'} already: 6 slides" in trained[1]
    assert "indexed " not in trained[1]


def test_one_node(trained):
    out, printed = trained
    summary = summary_of(out)
    assert (summary["status"], summary["ranks"], summary["steps"]) == ("completed", 2, 6)
    assert summary["strategy"] == "ddp"
    assert len(set(losses_of(out))) == 6
    assert "\x1b" not in printed


@pytest.mark.parametrize(
    ("script", "options", "parallel", "ranks", "tolerance"),
    [
        ("train_nodes.sbatch", "", ("--parallel", "ddp"), 2, 0),
        ("mpi.sbatch", "--ntasks-per-node=2", ("--parallel", "ddp"), 2, 0),
        ("hybrid.sbatch", "--ntasks-per-node=2", (), 4, 1e-5),
    ],
    ids=["two nodes with torchrun", "mpi", "two nodes of stages with plain srun"],
)
def test_other_starts_compute_the_same(
    script, options, parallel, ranks, tolerance, slurm, classify_slides, indexed, trained, tmp_path
):
    out = with_index(indexed, tmp_path / "run")
    arguments = ("--slides", classify_slides, "--out", out, *RUN, *parallel)
    run_job(slurm, tmp_path, options, script, *arguments, **({"RANKS": "1"} if script == "train_nodes.sbatch" else {}))
    summary = summary_of(out)
    expected = ("completed", ranks, "ddp" if parallel else "1f1b")
    assert (summary["status"], summary["ranks"], summary["strategy"]) == expected
    if not parallel:
        assert json.loads((out / "env.json").read_text())["launcher"]["started_by"] == "slurm"
    assert losses_of(out) == pytest.approx(losses_of(trained[0]), rel=tolerance, abs=0)


def test_a_run_that_is_preempted_and_then_loses_a_node_is_requeued_and_goes_on(
    slurm, classify_slides, indexed, trained, tmp_path
):
    """A rank on each of two nodes, of which one goes: the other computes all of each step, to the same numbers."""
    out, output = with_index(indexed, tmp_path / "run"), tmp_path / "job.out"
    arguments = ("--slides", classify_slides, *RUN, "--parallel", "ddp", "--model", UNHURRIED)
    job = slurm.submit(
        "--nodes=1-2",
        f"--output={output}",
        ROOT / "configs" / "slurm" / "preemptible.sbatch",
        *(*arguments, "--checkpoint-every", "1"),
        cwd=ROOT,
        environment={**ENVIRONMENT, "RUN": str(out), "RANKS": "1"},
    )
    wait_for(lambda: (out / "metrics.csv").exists() and len(rows_of(out / "metrics.csv")) >= 2, output)
    # As Slurm does before the time is up: to the steps, not the script.
    sent = slurm.run("scancel", "--signal=USR1", job)
    assert sent.returncode == 0, sent.stderr
    wait_for(lambda: "restarted (attempt 2): continuing from step " in output.read_text(), output)
    try:
        # A node that is given up is drained; its rank goes with it.
        assert slurm.run("scontrol", "update", f"nodename={NODES[1]}", "state=drain", "reason=lost").returncode == 0
        rank_of(out, 1).kill()
        assert slurm.wait(job, 240) == "COMPLETED", output.read_text()
    finally:
        slurm.run("scontrol", "update", f"nodename={NODES[1]}", "state=resume")
    assert (slurm.job(job)["Restarts"], slurm.job(job)["NumNodes"]) == ("2", "1")
    lost = re.findall(
        r"restarted \(attempt 3 on 1 rank in place of 2\): continuing from step (\d+)", output.read_text()
    )
    summary = summary_of(out)
    assert (summary["status"], summary["ranks"], summary["steps"]) == ("completed", 1, 6)
    found, expected = losses_of(out), losses_of(trained[0])
    assert found[: int(lost[0])] == expected[: int(lost[0])]
    assert found == pytest.approx(expected, 1e-4)


def wait_for(what, output):
    """Until ``what``, of a job that prints to ``output``."""
    end = time.monotonic() + 150
    while not what():
        assert time.monotonic() < end, output.read_text()
        time.sleep(0.05)


def test_a_task_that_does_not_come_is_named_once(slurm, tmp_path):
    train = train_command("--slides", tmp_path, "--out", tmp_path / "run", "--parallel", "ddp", "--join-timeout-s=2")
    late = "test $SLURM_PROCID = 1 && sleep 300; exec " + " ".join(train)
    done = slurm.run(
        *("srun", "--ntasks=2", "--kill-on-bad-exit=1", "sh", "-c", late),
        cwd=ROOT,
        environment=ENVIRONMENT,
        timeout_s=140,
    )
    assert done.returncode != 0
    (error,) = (line for line in done.stderr.splitlines() if "python -m app.train: error: " in line)
    assert "rank 1 of 2 did not come within " in error
    assert "whether the launcher started 2 ranks" in error


WHO = "import sys; from app.settings.launcher import find_launch; print(sys.argv[1], find_launch())"


def test_batch_scripts_and_steps_are_told_apart(slurm, tmp_path):
    who = f'"{sys.executable}" -c "{WHO}"'
    script = tmp_path / "job.sh"
    script.write_text(
        f"#!/bin/sh\n{who} batch\nsrun --nodes=1 --ntasks=1 {who} one\nsrun --label {who} several\n"
        f"srun --label --mpi=pmi2 {who} mpi\n"
    )
    # Errors apart: srun says there that it waits when the step before has not been cleared away yet.
    files = (f"--output={tmp_path}/out", f"--error={tmp_path}/err")
    job = slurm.submit("--nodes=2", "--ntasks=3", "--distribution=block", *files, script, cwd=ROOT)
    assert slurm.wait(job, 60) == "COMPLETED", (tmp_path / "err").read_text()
    lines = sorted((tmp_path / "out").read_text().splitlines())
    places = ((0, 0, 2), (1, 1, 2), (2, 0, 1))  # rank, local rank, local world
    assert lines == sorted(
        [
            *("batch None", "one None"),
            *(
                f"{rank}: {name} Launch(rank={rank}, world=3, local_rank={local}, local_world={tasks}, mpi={mpi})"
                for name, mpi in (("several", False), ("mpi", True))
                for rank, local, tasks in places
            ),
        ]
    )
    shell = slurm.run("salloc", "--ntasks=2", sys.executable, "-c", WHO, "salloc", cwd=ROOT)
    assert "salloc None\n" in shell.stdout, shell.stderr


@pytest.mark.parametrize("hosts", ["a[01-03,7],b", "r[1-2]n[09-10]", "login", ",".join(NODES)])
def test_hosts_are_those_that_slurm_makes_of_a_list(slurm, hosts):
    assert first_host(hosts) == slurm.run("scontrol", "show", "hostnames", hosts).stdout.split()[0]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_open_with_their_command_and_slurm_takes_them(slurm, script):
    shebang, command, *_ = script.read_text().splitlines()
    assert shebang == "#!/bin/bash"
    assert f"sbatch configs/slurm/{script.name} --slides DIR" in command
    checked = slurm.run("sbatch", "--test-only", script, "--slides", "somewhere", cwd=ROOT)
    assert checked.returncode == 0, checked.stderr
    assert "to start at" in checked.stderr
