"""A node is checked before ranks start on it, and left out if it is not fit."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slurm import ready, records
from tests.faults.conftest import user_of
from tests.faults.kit import SHORT, Undisturbed, ended
from tests.launcher.kit import report
from trainer.errors import BadNodeError
from trainer.parallel import fitness, world
from trainer.parallel.fitness import Fitness

# index, uuid, memory used and total in MiB, uncorrected ECC errors
GOOD = "0, GPU-a, 1, 81559, 0\n1, GPU-b, 500, 81559, 0\n"


@pytest.mark.parametrize(
    ("table", "visible", "wanted", "told"),
    [
        (GOOD, "", 2, []),
        (GOOD, "1", 1, []),
        (GOOD, "GPU-a,GPU-b", 2, []),
        (GOOD, "MIG-7", 8, []),
        ("0, GPU-a, [N/A], 81559, [N/A]", "", 1, []),
        (GOOD, "1", 2, ["nvidia-smi shows 1 of the 2 GPUs of this job"]),
        ("", "", 1, ["nvidia-smi shows 0 of the 1 GPUs of this job"]),
        (
            "0, GPU-a, 40000, 81559, 0\n1, GPU-b, 1, 81559, 3\n",
            "",
            2,
            ["GPU 0 is in use: 40000 of 81559 MiB", "GPU 1 has 3 uncorrected ECC errors"],
        ),
        ("0, GPU-a, 40000, 81559, 0\n1, GPU-b, 1, 81559, 3\n", "0", 1, ["GPU 0 is in use"]),
    ],
)
def test_gpus_that_are_missing_taken_or_faulty_are_named(table, visible, wanted, told):
    found = list(ready.gpu_faults(table, visible, wanted))
    assert len(found) == len(told)
    for line, words in zip(found, told, strict=True):
        assert line.startswith(words)


def run_ready(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """The check as a node's script calls it."""
    (folder / "logs").mkdir(exist_ok=True)
    own = {"RUN_DIR": str(folder), "LOGS": str(folder / "logs"), "NODE_NAME": "n7"}
    own |= {"NODE_RANK": "1", "RANKS_PER_NODE": "1", "PYTHONPATH": os.getcwd()}
    argv = [sys.executable, "-P", "-m", "slurm.ready"]
    return subprocess.run(argv, env={**os.environ, **own, **env}, capture_output=True, text=True)


def test_a_fit_node_says_nothing_and_leaves_no_record(tmp_path):
    done = run_ready(tmp_path, TMPDIR=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list((tmp_path / "logs").iterdir())


def test_all_faults_of_a_node_are_told_at_once(tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\necho 'Unable to determine the device handle: GPU is lost'; exit 15\n"
    )
    tool.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    absent = str(tmp_path / "absent")
    done = run_ready(tmp_path, PATH=path, SLURM_GPUS_ON_NODE="8", TMPDIR=absent)
    assert done.returncode == 1
    record = json.loads((tmp_path / "logs" / "error_node_1.json").read_text())
    assert record["message"] == (
        f"node n7 is not fit for training: {absent} cannot be used: No such file or directory; "
        "nvidia-smi fails: Unable to determine the device handle: GPU is lost"
    )
    assert record["message"] in done.stdout and not record["permanent"]


def test_a_gpu_that_is_freed_within_seconds_is_fit(tmp_path):
    """Ranks of an earlier start, on a node that Slurm had given up, stop by then."""
    tool, asked = tmp_path / "nvidia-smi", tmp_path / "asked"
    tool.write_text(
        f"#!/bin/sh\n[ -e {asked} ] || used=0000\ntouch {asked}\n"
        'echo "0, GPU-a, 4$used, 81559, 0"\n'
    )
    tool.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = run_ready(tmp_path, PATH=path, SLURM_GPUS_ON_NODE="1", TMPDIR=str(tmp_path))
    assert done.returncode == 0 and asked.exists(), done.stdout


def test_every_unfit_node_of_an_attempt_is_left_out_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "11")
    (tmp_path / "logs").mkdir()
    records.begin(tmp_path, ["n1", "n2", "n3", "n4"])
    for number, node in enumerate(["n2", "n4"]):
        record = {"host": node, "time": 1, "type": "BadNodeError", "message": f"node {node} is bad"}
        (tmp_path / "logs" / "0" / f"error_node_{number}.json").write_text(json.dumps(record))
    assert records.end(tmp_path, 0, 1, max_retries=3) == "run"
    told = json.loads((tmp_path / "status.json").read_text())
    assert (told["cause"], told["message"]) == ("bad_node", "node n2 is bad")
    assert records.nodes_to_leave(tmp_path, ["n1", "n2", "n3", "n4"]) == ["n2", "n4"]


# The ranks' own check ------------------------------------------------------------------------

FIT = Fitness("n1", True, 600.0, True, 180.0)


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ([FIT, FIT], {}),
        ([FIT, replace(FIT, tflops=550.0)], {}),
        ([FIT, FIT, replace(FIT, node="n2", tflops=200.0)], {2: "node n2, rank 2: a matrix"}),
        ([FIT, replace(FIT, product_is_right=False)], {1: "node n1, rank 1: a matrix product is"}),
        ([FIT, FIT, replace(FIT, sum_is_right=False)], {2: "node n1, rank 2: the sum of an all-"}),
        ([replace(FIT, sum_is_right=False)] * 3, {0: "node n1, rank 0: the sum of an all-reduce"}),
    ],
)
def test_a_rank_that_computes_wrong_numbers_or_slowly_is_named(found, told):
    faults = fitness.faults(found, compare_speed=True)
    assert faults.keys() == told.keys()
    for rank, words in told.items():
        assert faults[rank].startswith(words)


def test_a_wrong_product_ends_the_rank_and_no_check_is_no_check(monkeypatch):
    alone = world.start("cpu")
    try:
        assert fitness.check(alone) == ""
        product = torch.Tensor.__matmul__

        def one_number_is_wrong(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            made = product(left, right)
            if made.dim() == 2:
                made[3, 5] += 2
            return made

        monkeypatch.setattr(torch.Tensor, "__matmul__", one_number_is_wrong)
        with pytest.raises(BadNodeError, match="a matrix product is wrong"):
            fitness.check(alone)
        monkeypatch.setenv("NODE_CHECK", "no")
        assert fitness.check(alone) == ""
    finally:
        world.stop()


@pytest.mark.long
def test_an_unfit_node_is_left_out_before_training(new_cluster, root, undisturbed, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        '#!/bin/sh\n[ "$SLURMD_NODENAME" = n2 ] && errors=3\n'
        'echo "0, GPU-a, 1, 81559, ${errors:-0}"\n'
    )
    tool.chmod(0o755)
    assert isinstance(undisturbed, Undisturbed)
    with new_cluster("unfit", "--nodes", "3", "--requeue-delay", "5") as cluster:
        user = user_of(cluster, root)
        user.env["PATH"] = f"{tmp_path}:{user.env['PATH']}"
        _, run = user.submit(*SHORT)
        first, second = ended(user, run, "COMPLETED")
        assert (first["cause"], first["bad_nodes"]) == ("bad_node", ["n2"]), report(run)
        assert "GPU 0 has 3 uncorrected ECC errors" in first["message"]
        assert second["nodes"] == ["n1", "n3"] and second["restart_count"] == 1
        undisturbed.is_equalled_by(run)
