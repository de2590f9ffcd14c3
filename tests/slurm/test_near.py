"""Ranks are bound to the CPUs near their GPUs, by sysfs and what nvidia-smi shows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurm import near

ROOT = Path(__file__).parents[2]
ALL = set(range(128))


def made(folder: Path, domains: dict[str, str], gpus: list[str]) -> Path:
    """The files of sysfs: the CPUs of each NUMA domain, and the domain of each GPU."""
    for domain, cpus in domains.items():
        path = folder / f"devices/system/node/node{domain}/cpulist"
        path.parent.mkdir(parents=True)
        path.write_text(f"{cpus}\n")
    for number, domain in enumerate(gpus):
        path = folder / f"bus/pci/devices/0000:{number:02x}:00.0/numa_node"
        path.parent.mkdir(parents=True)
        path.write_text(f"{domain}\n")
    return folder


def table(count: int) -> str:
    """What nvidia-smi prints for so many GPUs."""
    return "".join(f"{n}, GPU-{n}, 00000000:{n:02X}:00.0\n" for n in range(count))


def whole(text: str) -> str:
    """A list of the kernel's as it is printed."""
    return ",".join(map(str, sorted(near._numbers(text))))


@pytest.mark.parametrize(
    ("domains", "gpus", "allowed", "wanted"),
    [
        # Two sockets with four GPUs each, and with every second thread's number far from the first.
        ({"0": "0-31,64-95", "1": "32-63,96-127"}, ["0"] * 4 + ["1"] * 4, ALL, None),
        # DGX A100: eight domains, and GPUs at every second one.
        ({f"{n}": f"{16 * n}-{16 * n + 15}" for n in range(8)}, [*"33117755"], ALL, None),
        # Half of the node: its CPUs of domain 0, where two of the GPUs are.
        ({"0": "0-63", "1": "64-127"}, ["0", "0"], set(range(64)), None),
        # Slurm gave CPUs of the other domain, or a few of this one: bound, ranks would share these.
        ({"0": "0-63", "1": "64-127"}, ["1", "1"], set(range(64)), ["-", "-"]),
        ({"0": "0-63", "1": "64-127"}, ["1", "1"], set(range(66)), ["-", "-"]),
        # A virtual machine says that it does not know.
        ({"0": "0-63", "1": "64-127"}, ["-1"], ALL, ["-"]),
    ],
)
def test_cpus_near_a_gpu(tmp_path, domains, gpus, allowed, wanted):
    found = near.lists(near.addresses(table(len(gpus)), ""), allowed, made(tmp_path, domains, gpus))
    assert found == (wanted or [whole(domains[domain]) for domain in gpus])


def test_gpus_are_in_the_order_of_cuda():
    assert near.addresses(table(12), "10,GPU-2") == ["0000:0a:00.0", "0000:02:00.0"]
    assert near.addresses(table(2), "MIG-7") == near.addresses("No devices were found", "") == []


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
def test_a_rank_runs_on_the_cpus_near_its_gpu(tmp_path):
    """The command of slurm/node.sh, and each rank as torchrun starts it."""
    cpus = sorted(os.sched_getaffinity(0))
    halves = [cpus[::2], cpus[1::2]]
    domains = {str(n): ",".join(map(str, half)) for n, half in enumerate(halves)}
    sysfs = made(tmp_path / "sys", domains, ["1", "0", "0"])
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat <<END\n{table(3)}END\n")
    tool.chmod(0o755)
    (tmp_path / "logs").mkdir()
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "0,2"}
    env |= {"LOGS": str(tmp_path / "logs"), "RANKS_PER_NODE": "2", "COOKBOOK": str(ROOT)}
    command = [sys.executable, "-P", "-m", "slurm.near", str(sysfs)]
    shown = subprocess.check_output(command, env=env | {"PYTHONPATH": str(ROOT)}, text=True)

    def bound(**more: str) -> str:
        task = [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]
        argv = ["bash", str(ROOT / "slurm/rank.sh"), *task]
        own = env | {"RANK": "0", "NEAR_CPUS": shown.strip()} | more
        return subprocess.check_output(argv, env=own, text=True).strip()

    assert bound(LOCAL_RANK="0") == f"[0] {halves[1]}"
    assert bound(LOCAL_RANK="1") == f"[0] {halves[0]}"
    # Not near any, a node's command instead of a rank, and a node with one domain.
    for more in ({"LOCAL_RANK": "0", "NEAR_CPUS": "- 0"}, {}, {"LOCAL_RANK": "0", "NEAR_CPUS": ""}):
        assert bound(**more) == f"[0] {cpus}"
