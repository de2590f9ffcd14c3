"""slurm/rendezvous.py, the check before torchrun: nodes connect, or a message names the node."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from slurm.rendezvous import port_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def node(rank: int, port: int, nodes: int = 3, **changes: str) -> subprocess.Popen[str]:
    """Start rendezvous.py as slurm/node.sh does on one node."""
    env = {
        "PATH": os.environ["PATH"],
        "NODE_NAME": f"n{rank + 1}",
        "NODE_RANK": str(rank),
        "NODES": str(nodes),
        "RUN_DIR": "/runs/one",
        "COOKBOOK_ATTEMPT": "0",
        "HEAD_ADDR": "127.0.0.1",
        "HEAD_PORT": str(port),
        "ONE_HOST": "yes",
        "RENDEZVOUS_WAIT_S": "2",
        **changes,
    }
    return subprocess.Popen(
        [sys.executable, "-I", "-S", ROOT / "slurm" / "rendezvous.py"],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, errors = process.communicate(timeout=30)
    return process.returncode, output.strip(), errors.strip()


def test_nodes_connect_and_report_their_address(port):
    nodes = [node(rank, port, RENDEZVOUS_WAIT_S="20") for rank in (2, 1, 0)]
    for process in nodes:
        status, address, message = finish(process)
        assert (status, address) == (0, "127.0.0.1"), message
        assert "met the first node at 127.0.0.1" in message


def test_each_attempt_has_a_port_of_its_own():
    ports = [port_of(job, attempt) for job in ("41", "42") for attempt in range(4)]
    assert len({*ports}) == 8 and {*ports} < {*range(20000, 32000)}
    assert port_of("41", 3) == ports[3], "the same on every node"


def test_the_first_node_names_a_missing_node(port):
    first, second = node(0, port), node(1, port)
    assert finish(second)[0] == 0
    status, message, _ = finish(first)
    assert status == 1 and "node number 2 did not connect to the first node n1" in message


def test_a_node_without_an_answer_names_itself(port):
    status, message, _ = finish(node(1, port))
    assert status == 1 and message.startswith("node n2 did not reach the first node at 127.0.0.1")


def test_the_first_node_of_another_run_is_not_accepted(port):
    first = node(0, port, nodes=2)
    status, message, _ = finish(node(1, port, nodes=2, RUN_DIR="/runs/another"))
    assert status == 1 and "did not reach" in message
    assert finish(first)[0] == 1


@pytest.mark.parametrize(
    ("rank", "given", "told"),
    [
        (1, {"HEAD_ADDR": "no-such-host.invalid"}, "node n2 cannot resolve the first node's addr"),
        (1, {"ONE_HOST": "no"}, "to a loopback (127.0.0.1)"),
        (0, {"HEAD_ADDR": "192.0.2.1"}, "cannot listen on 192.0.2.1"),
    ],
)
def test_a_wrong_address_is_reported(port, rank, given, told):
    status, message, _ = finish(node(rank, port, **given))
    assert status == 1 and told in message


def test_a_port_that_is_taken_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as other:
        status, message, _ = finish(node(0, other.getsockname()[1]))
    assert status == 1 and "another program has taken the port" in message


THREADS = ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")


def variables(folder: Path, status: int = 0, **given: str) -> dict[str, str]:
    """What node.sh sets for ranks that start in a run's folder, or sets before it gives up."""
    (folder / "train.yaml").touch()
    env = {"PATH": os.environ["PATH"], "RUN_DIR": str(folder), "LOGS": str(folder)}
    env |= {"VENV": sys.prefix, "COOKBOOK": str(ROOT), "NODES": "1", "RANKS_PER_NODE": "1"}
    script = f"trap env EXIT; source {ROOT}/slurm/node.sh"
    done = subprocess.run(
        ["bash", "-c", script],
        env=env | {"NODE_CHECK": "no"} | given,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == status, done.stderr
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)


@pytest.mark.parametrize("given", [{}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}])
def test_torchs_memory_is_in_segments_that_grow_unless_it_is_set(tmp_path, given):
    own = None if given else "expandable_segments:True"
    assert variables(tmp_path, **given).get("PYTORCH_ALLOC_CONF") == own


@pytest.mark.parametrize(("nodes", "lazy"), [("16", None), ("17", "1")])
def test_ranks_of_many_nodes_connect_when_they_talk(tmp_path, port, nodes, lazy):
    # Without Slurm, nodes share the CPUs of this host.
    (tmp_path / "nproc").write_text("#!/bin/sh\necho ${OMP_NUM_THREADS:-70}\n")
    (tmp_path / "nproc").chmod(0o755)
    head = {"HEAD_ADDR": "127.0.0.1", "HEAD_PORT": str(port), "ONE_HOST": "yes", "NODES": nodes}
    more = {"RENDEZVOUS_WAIT_S": "0.1", "OMP_NUM_THREADS": "3"}
    more["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    # The other nodes do not come.
    found = variables(tmp_path, 1, **head, **more)
    assert found.get("TORCH_GLOO_LAZY_INIT") == lazy
    assert [found[name] for name in THREADS] == ["3", "4"]


@pytest.mark.parametrize(
    ("given", "threads"),
    [
        ({}, len(os.sched_getaffinity(0))),
        ({"RANKS_PER_NODE": "1000"}, 1),
        ({"SLURM_CPUS_ON_NODE": "12", "RANKS_PER_NODE": "4"}, 3),
        ({"SLURM_CPUS_PER_TASK": "24", "RANKS_PER_NODE": "4"}, 6),
    ],
    ids=["one rank", "many ranks", "slurm", "slurm's task"],
)
def test_ranks_share_a_nodes_cpus_if_the_site_names_none(tmp_path, given, threads):
    found = variables(tmp_path, **given)
    assert [found[name] for name in THREADS] == [str(threads)] * 2


@pytest.mark.parametrize("missing", ["train.yaml", "venv", "environment"])
def test_a_node_that_cannot_read_the_files_records_a_permanent_fault(tmp_path, missing):
    logs = tmp_path / "logs" / "0"
    logs.mkdir(parents=True)
    if missing != "train.yaml":
        (tmp_path / "train.yaml").touch()
    env = {
        "PATH": os.environ["PATH"],
        "RUN_DIR": str(tmp_path),
        "LOGS": str(logs),
        "VENV": sys.prefix if missing != "venv" else str(tmp_path / "nowhere"),
        "COOKBOOK": str(ROOT),
        "NODES": "1",
        "RANKS_PER_NODE": "1",
        "SLURMD_NODENAME": "n7",
        "FILES_WAIT_S": "1",
        "ENV_TITLE": "the environment of the recipe",
        "ENV_PYTHON": sys.executable if missing != "environment" else str(tmp_path / "nowhere"),
    }
    script = f"source {ROOT}/slurm/node.sh; echo trained"
    # What an earlier attempt has read is there: a retry may help.
    for attempt, permanent in (("0", True), ("1", False)):
        done = subprocess.run(
            ["bash", "-c", script],
            env={**env, "COOKBOOK_ATTEMPT": attempt},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1 and "trained" not in done.stdout
        fault = json.loads((logs / "error_node_0.json").read_text())
        assert fault["permanent"] is permanent
        assert fault["message"].startswith("node n7 cannot")
        assert {"train.yaml": "train.yaml", "venv": "the virtual environment"}.get(
            missing, "nowhere, the Python of the environment of the recipe"
        ) in fault["message"]
