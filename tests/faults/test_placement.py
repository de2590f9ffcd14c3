"""Nodes below switches: the order of ranks, and whose log is whose."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import SlurmCluster, running_cluster
from tests.faults.conftest import user_of
from tests.faults.kit import ended
from tests.launcher.kit import report


@pytest.fixture(scope="module")
def racks() -> Iterator[SlurmCluster]:
    """Four nodes: n1 and n3 below one switch, n2 and n4 below another."""
    shape = ("--nodes", "4", "--gpus", "1", "--switches", "2", "--requeue-delay", "5")
    with running_cluster("racks", *shape) as cluster:
        yield cluster


@pytest.mark.long
def test_ranks_below_one_switch_are_neighbours(
    racks: SlurmCluster, root: Path, tmp_path: Path
) -> None:
    (tmp_path / "command.sh").write_text('echo "rank $NODE_RANK on $NODE_NAME, first $HEAD_ADDR"\n')
    recipe = tmp_path / "ends.yaml"
    recipe.write_text(f"entry: command:bash {tmp_path}/command.sh\n")
    user = user_of(racks, root)
    _, run = user.submit("--recipe", str(recipe), "--nodes", "4", "--gpus-per-node", "1")
    (line,) = ended(user, run, "COMPLETED")
    order = ["n1", "n3", "n2", "n4"]
    assert line["nodes"] == order, report(run)
    for rank, node in enumerate(order):
        log = (run / f"logs/0/node_{rank}.log").read_text()
        assert f"rank {rank} on {node}, first 127.0.0.1\n" in log
    log = (run / "logs/job.log").read_text()
    assert log.count("a switch or block after the other: n1,n3 | n2,n4") == 1, log


@pytest.mark.named
def test_the_log_of_a_node_that_fails_has_its_rank(
    racks: SlurmCluster, root: Path, tmp_path: Path
) -> None:
    """The third node by name has rank 1. Its log was on its own disk."""
    program = "echo Traceback on $NODE_NAME; [ $NODE_NAME != n3 ] || exit 1; sleep 60"
    (tmp_path / "command.sh").write_text(program)
    recipe = tmp_path / "fails.yaml"
    recipe.write_text(f"entry: command:bash {tmp_path}/command.sh\nmax_retries: 0\n")
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites" / "site.yaml").write_text("logs: failing\n")
    user = user_of(racks, root)
    user = replace(user, env={**user.env, "COOKBOOK_CLUSTERS": str(tmp_path / "sites")})
    shape = ["--nodes", "4", "--gpus-per-node", "1", "--cluster", "site"]
    _, run = user.submit("--recipe", str(recipe), *shape)
    ended(user, run, "FAILED")
    log = (run / "logs/0/node_1.log").read_text()
    assert "[1] Traceback on n3" in log, report(run)
