"""cookbook doctor on the one-host Slurm: what is right, what is wrong, and nothing left behind."""

import json
import os
import shutil
import subprocess
import sys
from functools import partial

import pytest

from launcher import paths
from tests.launcher.kit import Kit, until


@pytest.fixture
def site(request):
    """A site's file of the kit's own folder, for as long as the test lasts."""
    path = paths.CLUSTERS / f"doctor-{os.getpid()}.yaml"

    def write(text: str) -> str:
        path.write_text(text)
        return path.stem

    yield write
    path.unlink(missing_ok=True)


def doctor(kit: Kit, *arguments: str) -> tuple[int, list[dict[str, str]]]:
    """The exit status and the findings; nothing may be left behind."""
    before = sorted(kit.root.parent.rglob("*"))
    done = kit.cookbook("doctor", "--json", *arguments)
    assert "Traceback" not in done.stderr, done.stderr
    findings = json.loads(done.stdout)["findings"]
    assert sorted(kit.root.parent.rglob("*")) == before
    if kit.env.get("SLURM_CONF"):
        names = ["squeue", "--noheader", "--format=%j"]
        queue = partial(subprocess.run, names, env=kit.env, capture_output=True, text=True)
        # A job that has ended is in the queue for another moment.
        until(lambda: "cookbook-doctor" not in queue().stdout, 15)
    for finding in findings:
        assert finding["state"] in ("ok", "warning", "failed", "skipped")
        # Whatever a user can fix says how.
        says = finding["remedy"] or ": " in finding["message"]
        assert says or finding["state"] in ("ok", "skipped"), finding
    return done.returncode, findings


def states(findings: list[dict[str, str]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for finding in findings:
        found.setdefault(finding["subject"], set()).add(finding["state"])
    return found


def text_of(findings: list[dict[str, str]], check: str, state: str) -> str:
    return " | ".join(
        f"{each['message']}: {each['remedy']}"
        for each in findings
        if (each["subject"], each["state"]) == (check, state)
    )


def test_a_site_in_order_is_found_so(slurm_user: Kit):
    status, findings = doctor(slurm_user)
    assert status == 0, findings
    found = states(findings)
    right = "Slurm,partitions,accounting,sbatch test,virtual environment,"
    for check in f"{right}shared files,network".split(","):
        assert "ok" in found[check], (check, findings)
        assert not found[check] & {"failed", "skipped"}, (check, findings)
    assert "2 with 8 x h100" in text_of(findings, "partitions", "ok")
    assert "to start at" in text_of(findings, "sbatch test", "ok")
    # The one-host cluster's GPUs are stand-ins, which a real driver would have to answer for.
    assert found["GPUs"] <= {"warning", "ok", "failed"}


def test_no_slurm_is_one_fault_that_hides_nothing_else(user: Kit):
    status, findings = doctor(user)
    found = states(findings)
    assert status == 1 and found["Slurm"] == {"failed"}
    assert found["sbatch test"] == found["nodes"] == {"skipped"}
    assert found["virtual environment"] <= {"ok", "warning"} and "shared folder" in found


def test_each_wrong_setting_of_the_site_is_named(slurm_user: Kit, site, tmp_path):
    name = site(
        "network_interface: ib7\n"
        "resources: {partition: gpus, gpu_type: h200, time: '00:10:00'}\n"
        f"shared_root: {tmp_path / 'elsewhere'}\n"
    )
    status, findings = doctor(slurm_user, "--cluster", name)
    assert status == 1
    told = text_of(findings, "sbatch test", "failed")
    assert "invalid partition" in told and f"fix resources: in configs/clusters/{name}.yaml" in told
    name = site("network_interface: ib7\nresources: {partition: gpu, gpu_type: h200}\n")
    status, findings = doctor(slurm_user, "--cluster", name)
    assert "Requested node configuration" in text_of(findings, "sbatch test", "failed")
    assert states(findings)["nodes"] == {"failed"}  # no such GPU anywhere: the job is refused
    name = site("network_interface: ib7\njob_setup:\n  - export A=1\n  - module load cuda/12.8\n")
    status, findings = doctor(slurm_user, "--cluster", name)
    assert status == 1
    told = text_of(findings, "job_setup", "failed")
    assert f"{name}.yaml: 'module load cuda/12.8' failed on n" in told
    assert "exit status 127: fix that line" in told
    assert "network_interface ib7 is not up on n" in text_of(findings, "network", "failed")


def test_an_environment_that_the_node_cannot_use(slurm_user: Kit, tmp_path):
    venv = tmp_path / "venv"
    packages = venv / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"
    for package in ("torch-2.13.0.dist-info", "click-7.0.dist-info", "torch"):
        (packages / package).mkdir(parents=True)
    (packages / "torch" / "version.py").write_text(
        "__version__ = '2.13.0+cu130'\ncuda: str = '13.0'\n"
    )
    (venv / "bin").mkdir()
    (venv / "bin" / "python").symlink_to("/no/such/python")
    kit = Kit({**slurm_user.env, "COOKBOOK_VENV": str(venv)}, slurm_user.root)
    status, findings = doctor(kit)
    told = text_of(findings, "virtual environment", "failed")
    assert status == 1 and f"there is no {venv}/bin/python" in told
    assert "does not see" in told and "or the Python that it was made with" in told
    (venv / "bin" / "python").unlink()
    shutil.copy(os.path.realpath(sys.executable), venv / "bin" / "python")
    status, findings = doctor(kit)
    told = text_of(findings, "virtual environment", "failed")
    assert "lacks torch transformers: bash setup.sh" in told
    told = text_of(findings, "virtual environment", "warning")
    assert "setup.sh did not finish" in told and "click 7.0 (pinned" in told


def test_a_busy_cluster_is_not_waited_for(new_cluster, slurm_user: Kit):
    with new_cluster("busy", "--nodes", "1", "--gpus", "0") as cluster:
        cluster.run(
            ["sbatch", "--exclusive", "--chdir=/tmp", "--output=/dev/null", "--wrap=sleep 99"]
        )
        kit = Kit({**slurm_user.env, "SLURM_CONF": cluster.env["SLURM_CONF"]}, slurm_user.root)
        status, findings = doctor(kit, "--wait", "1")
        assert status == 0, findings
        told = text_of(findings, "nodes", "skipped")
        assert "did not start within 1 s and was cancelled" in told and "--wait" in told
        assert "1 nodes without GPUs" in text_of(findings, "partitions", "ok")


def test_what_the_driver_says_is_checked_against_torch_and_the_request(slurm_user: Kit, tmp_path):
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    venv = tmp_path / "venv"
    packages = venv / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"
    (packages / "torch").mkdir(parents=True)
    env = {
        **slurm_user.env,
        "PATH": f"{tool.parent}:{slurm_user.env['PATH']}",
        "COOKBOOK_VENV": str(venv),
    }

    def gpus(driver: str, cuda: str) -> list[dict[str, str]]:
        tool.write_text(f"#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 81559, {driver}'\n")
        tool.chmod(0o755)
        (packages / "torch" / "version.py").write_text(f"__version__ = '2.13.0'\ncuda = {cuda}\n")
        return doctor(Kit(env, slurm_user.root))[1]

    found = gpus("580.65.06", "'13.0'")
    told = "1 x NVIDIA H100 80GB HBM3, 80 GiB, driver 580.65.06; torch is built for CUDA 13.0"
    assert told in text_of(found, "GPUs", "ok") and states(found)["GPUs"] == {"ok"}
    found = gpus("570.86.15", "'13.0'")
    assert "needs driver 580 or newer" in text_of(found, "GPUs", "failed")
    found = gpus("580.65.06", "None")
    assert "the installed torch is built for CPUs" in text_of(found, "GPUs", "failed")


def test_a_shared_folder_that_the_nodes_do_not_share(slurm_user: Kit, tmp_path):
    """Slurm's daemons run as this user, so a folder is hidden by being only this process's own."""
    program = 'mount -t tmpfs none "$1" && exec "$2" -m launcher doctor --json'
    root = tmp_path / "private"
    root.mkdir()
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "bash", "-c", program, "-", root, sys.executable],
        env={**slurm_user.env, "COOKBOOK_ROOT": str(root)},
        capture_output=True,
        text=True,
        cwd=paths.REPO_ROOT,
    )
    if "unshare" in done.stderr:
        pytest.skip("this machine allows no private mounts")
    findings = json.loads(done.stdout)["findings"]
    assert done.returncode == 1
    told = text_of(findings, "shared files", "failed")
    assert f"does not see what was written to {root}" in told and "COOKBOOK_ROOT" in told
