"""Runs as batch jobs of a real Slurm of two nodes, both on this machine."""

from __future__ import annotations

from tests.helpers.slurm import NODES, Slurm


def test_this_slurm_starts_tasks_on_both_nodes(slurm: Slurm) -> None:
    done = slurm.run("srun", "--nodes=2", "--ntasks=2", "sh", "-c", "echo $SLURM_PROCID $SLURMD_NODENAME")
    assert sorted(done.stdout.splitlines()) == [f"{rank} {node}" for rank, node in enumerate(NODES)], done.stderr
