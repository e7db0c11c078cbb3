from pathlib import Path

from parallel.comm.local import LocalCommunicator
from tests.contracts.communicator_contract import check_communicator
from tests.helpers.ranks import run_on_ranks


def test_local_communicator_keeps_the_contract() -> None:
    assert check_communicator(LocalCommunicator()) == {"rank": 0, "world": 1}


def test_torch_communicator_keeps_the_contract_on_two_ranks(tmp_path: Path) -> None:
    results = run_on_ranks(2, "tests.contracts.communicator_contract:check_communicator", tmp_path)
    assert results == [{"rank": 0, "world": 2}, {"rank": 1, "world": 2}]
