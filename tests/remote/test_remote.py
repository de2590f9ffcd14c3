"""cookbook --host, through real sshds with a second factor, a slow network and broken lines."""

import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.errors import RemoteFault, UsageFault
from launcher.remote import client, fetch, hosts, install, ssh
from launcher.remote.client import Command
from launcher.remote.hosts import Host
from launcher.remote.ssh import Connection
from launcher.runs.directory import Run
from tests.remote import kit
from tests.remote.kit import Cluster

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        kit.SSHD is None, reason="sshd is not installed: bash setup.sh --test-all installs it"
    ),
]
RECIPE = "extends: demo\ndescription: mine\ndataset: {data_files: my.jsonl}\n"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    with kit.cluster(tmp_path_factory.mktemp("cluster")) as found:
        yield found


@pytest.fixture(autouse=True)
def connected(cluster) -> Iterator[None]:
    """Every test begins with one authentication, and a network that works."""
    cluster.network.delay_s, cluster.network.rotating = 0.0, False
    cluster.network.cut_after.clear()
    if cluster.ssh("-O", "check", "cluster").returncode:
        cluster.authenticate()
    yield


@pytest.fixture
def project(tmp_path) -> Path:
    """A working tree of the user's, with work that is not committed."""
    folder = tmp_path / "project"
    (folder / "sub").mkdir(parents=True)
    subprocess.run(["git", "init", "-q", folder], check=True)
    (folder / ".gitignore").write_text("my.jsonl\nbig/\n")
    (folder / "mine.yaml").write_text(RECIPE)
    (folder / "my.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    (folder / "train.py").write_text(f"print({os.urandom(4).hex()!r})\n")
    return folder


@pytest.fixture
def run(cluster) -> Run:
    """A run of the cluster with a model of 6 MiB and a log."""
    made = Run(cluster.root / "runs" / f"20261122-151728-demo-{os.urandom(2).hex()}")
    logs = made.path / "logs" / "0"
    logs.mkdir(parents=True)
    (made.path / "logs" / "latest").symlink_to("0")
    (made.path / "export").mkdir()
    (made.path / "export" / "model.safetensors").write_bytes(os.urandom(6 * 2**20))
    (made.path / "export" / "config.json").write_text("{}")
    asked = {"nodes": 1, "gpus_per_node": 1}
    made.write("submission.json", {"recipe": "demo", "jobs": [{"job_id": "7"}], "asked": asked})
    made.write("status.json", {"job_id": "7", "state": "RUNNING", "attempt": 0, "started": 1.0})
    (logs / "node_0.log").write_text("first\n")
    return made


def test_without_a_connection_the_command_that_opens_it_is_told(cluster, project):
    cluster.hang_up()
    before = cluster.prompts
    done = cluster.cookbook("status", cwd=project)
    if os.geteuid() == 0:
        assert done.returncode == 1 and cluster.prompts == before
        assert re.fullmatch(
            r"error: there is no open .* with: ssh -F \S+ -Nf .* cluster\n", done.stderr
        )
        cluster.authenticate()
        assert cluster.prompts == before + 1
        for command in (["status"], ["submit", "mine.yaml", "--dry-run"]):
            cluster.cookbook(*command, cwd=project)
        assert cluster.prompts == before + 1
    done = cluster.cookbook("status", "--json", cwd=project)
    assert done.returncode == 0 and json.loads(done.stdout) == []


def test_the_command_that_is_told_replaces_a_connection_that_died(cluster, monkeypatch):
    """Its socket is left, as by a laptop that was switched off."""
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    pid = re.search(r"pid=(\d+)", cluster.ssh("-O", "check", "cluster").stderr)
    os.kill(int(pid[1]), signal.SIGKILL)
    assert (cluster.folder / "cm").exists()
    connection = Connection(Host("cluster"), print)
    assert not connection.master
    subprocess.run(connection.opening.split(), env=cluster.env, check=True, timeout=60)
    assert Connection(Host("cluster"), print).master


def test_a_host_that_does_not_answer_is_named(cluster, project, monkeypatch):
    monkeypatch.setattr(ssh, "_SILENT_S", 0.5)
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(project)
    cluster.network.delay_s = 0.6
    said: list[str] = []
    with client.ExitStack() as stack:
        connection = Connection(Host("cluster", str(kit.paths.REPO_ROOT)), said.append)
        assert Command(connection, ["status"], said.append, stack).run() == 0
    master = re.escape(f"ssh -F {cluster.folder}/config -O exit cluster")
    assert re.fullmatch(rf"cluster has not answered for 0.5 s; waiting .* {master}", said[0])


def test_faults_and_exit_codes_are_those_of_the_cluster(cluster, project, monkeypatch):
    done = cluster.cookbook("submit", "dmeo", cwd=project)
    assert (done.returncode, done.stdout) == (2, "") and "did you mean demo?" in done.stderr
    done = cluster.cookbook("statsu", cwd=project)
    assert done.returncode == 2 and "did you mean status?" in done.stderr
    config = Path(cluster.env["HOME"]) / ".config/slurm-cookbook/config.yaml"
    before = config.read_text()
    config.write_text("kits: {cluster: nowhere}\n")
    done = cluster.cookbook("status", cwd=project)
    config.write_text(before)
    assert done.returncode == 1 and "install it with: cookbook init --host cluster" in done.stderr


COMMANDS = [
    ["status"],
    ["logs", "last"],
    ["report", "last"],
    ["check", "mine.yaml", "--local"],
    ["submit", "mine.yaml", "--dry-run"],
    ["watch", "{run}"],
    ["results"],
    ["diff", "{run}", "last"],
    ["cancel", "{run}"],
    ["resume", "{run}"],
    ["sweep", "demo_settings", "--dry-run"],
    ["eval", "none", "--local"],
    ["prepare", "none.yaml"],
    ["registry"],
    ["query", "none", "mine.yaml"],
]


def test_round_trips(cluster, project, run, monkeypatch, capfd):
    """Two at most, with a tree that was never sent, in one ssh call, whatever the command says."""
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(project)
    monkeypatch.setattr(client, "__version__", "0.0.1")
    run.write("status.json", {**run.status, "state": "COMPLETED"})
    cluster.network.delay_s = 0.025  # 50 ms there and back
    for command in [*COMMANDS, ["fetch", run.name]]:
        before, began = cluster.calls, time.monotonic()
        with client.ExitStack() as stack:
            connection = Connection(Host("cluster", str(kit.paths.REPO_ROOT)), print)
            if command[0] == "fetch":
                fetch.fetch(connection, run.name, "export", None, None, print)
            else:
                words = [word.format(run=run.name) for word in command]
                Command(connection, words, print, stack).run()
        trips, took_s = sum(each.turns for each in connection.sessions), time.monotonic() - began
        assert cluster.calls - before == len(connection.sessions) == 1
        assert trips <= 2, command
        other = "this machine has version 0.0.1 of the kit"
        assert (other in capfd.readouterr().out) == (command[0] != "fetch")
        with capfd.disabled():
            print(f"{' '.join(command)}: {trips} round trips, {took_s:.1f} s")


def test_the_tree_is_sent_once_and_as_it_is(cluster, project):
    (project / "data.bin").write_bytes(os.urandom(11 * 2**20))
    elsewhere = project.parent / "other.jsonl"
    elsewhere.write_text(f'{{"prompt": "a", "response": "{os.urandom(4).hex()}"}}\n')
    dry = ["submit", "../mine.yaml", "--dry-run", f"dataset_val.data_files={elsewhere}"]
    done = cluster.cookbook(*dry, cwd=project / "sub")
    assert done.returncode == 0, done.stderr
    assert (
        "not sent: data.bin (11.0 MiB; above 10 MiB" in done.stderr and "of 5 files" in done.stderr
    )
    before = cluster.network.sent["up"]
    done = cluster.cookbook(*dry, cwd=project / "sub")
    assert "sent " not in done.stderr.replace("not sent", "")
    assert cluster.network.sent["up"] - before < 20_000
    first = (project / "train.py").read_text()
    (project / "train.py").write_text("print(2)\n")
    done = cluster.cookbook(*dry, cwd=project / "sub")
    assert "sent 1 of 5 files, 0.0 MiB: train.py" in done.stderr
    trees = [
        path.read_text() for path in (kit.paths.sent(cluster.root) / "trees").glob("*/train.py")
    ]
    assert {first, "print(2)\n"} <= set(trees)
    # Only what was sent is private: the models and data of the command are for the group too.
    modes = [folder.stat().st_mode & 0o777 for folder in (cluster.root, project / "sub")]
    assert modes[0] == modes[1] and kit.paths.sent(cluster.root).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_transfer_that_breaks_continues(cluster, project, run, way):
    big = project / "big" / "my.jsonl"
    big.parent.mkdir()
    big.write_bytes(b"".join(os.urandom(500).hex().encode() + b"\n" for _ in range(12000)))
    command = ["check", "demo", "--local", "--data", "big/my.jsonl"]
    command = command if way == "up" else ["fetch", run.name]
    process = cluster.start(*command, cwd=project)
    cluster.network.cut_after[way] = 4 * 2**20
    total = cluster.network.sent[way]
    while way in cluster.network.cut_after:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    cluster.authenticate()
    _, err = process.communicate(timeout=60)
    assert b"was lost; reconnecting" in err, err
    if way == "down":
        assert process.returncode == 0, err
        fetched = project / run.name / "export" / "model.safetensors"
        assert fetched.read_bytes() == (run.path / "export" / fetched.name).read_bytes()
        again = cluster.cookbook("fetch", run.name, cwd=project)
        assert "0.0 MiB came over the connection" in again.stderr
        whole = 6 * 2**20
    else:
        contents = list((kit.paths.sent(cluster.root) / "files").glob("*.-"))
        assert big.read_bytes() in [path.read_bytes() for path in contents]
        whole = 6.5 * 2**20  # hexadecimal digits, compressed
    # What had arrived was not sent again, but for the 2 MiB that ssh has on its way.
    assert cluster.network.sent[way] - total < whole + 3 * 2**20


def test_logs_come_once_each_through_breaks_and_other_login_nodes(cluster, project, run):
    cluster.hang_up()
    cluster.network.rotating = True
    cluster.authenticate()
    lines = [f"line {number} {'x' * 200}" for number in range(600)]

    def write() -> None:
        with (run.logs / "0" / "node_0.log").open("a") as log:
            for number, line in enumerate(lines):
                print(line, file=log, flush=True)
                time.sleep(0.005)
                if number in (150, 400):
                    cluster.network.cut()
                    cluster.authenticate()
        run.write("status.json", {**run.status, "state": "COMPLETED"})

    sessions = kit.paths.sent(cluster.root) / "sessions"
    before = len(list(sessions.glob("*")))
    process = cluster.start("logs", run.name, "-f", cwd=project)
    time.sleep(1.5)
    writer = threading.Thread(target=write)
    writer.start()
    out, err = process.communicate(timeout=60)
    writer.join()
    assert process.returncode == 0, err
    assert out.decode().splitlines()[1:] == ["first", *lines]
    assert len(list(sessions.glob("*"))) == before + 1, "the command was started again"
    assert err.count(b"was lost") == 2 and {0, 1} <= set(cluster.network.served[-3:])


def test_ctrl_c_leaves_the_run(cluster, project, run):
    process = cluster.start("watch", run.name, cwd=project)
    assert process.stderr and process.stderr.read(1)  # it follows the log
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130 and b"the run continues; follow it with" in err
    assert run.status["state"] == "RUNNING"
    left = subprocess.run(["pgrep", "-f", f"launcher watch {run.name}"], capture_output=True)
    assert not left.stdout


def test_an_early_ctrl_c_is_no_traceback(cluster, project):
    """Whatever the command there is doing when it arrives."""
    before = cluster.calls
    process = cluster.start("results", cwd=project)
    while cluster.calls == before:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert b"Traceback" not in err and process.returncode in (0, 130), err


def test_two_clients_at_once(cluster, project):
    (project / "train.py").write_text(os.urandom(2**20).hex())
    both = [cluster.start("submit", "mine.yaml", "--dry-run", cwd=project) for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0 and out.startswith(b"#!/bin/bash"), err
    found = [p for p in (kit.paths.sent(cluster.root) / "files").iterdir() if p.suffix == ".part"]
    assert not found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_port_is_forwarded_and_closed(cluster, project, run, number):
    """Also if the terminal is closed: the master connection, which has the port, lives on."""
    (run.path / "tensorboard").mkdir()
    process = cluster.start("tensorboard", run.name, cwd=project)
    assert process.stderr
    address = ""
    for line in process.stderr:
        if found := re.search(rb"open: (http://\S+)", line):
            address = found[1].decode()
            break
    assert json.load(urllib.request.urlopen(f"{address}data/runs")) == []
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == (0 if number == signal.SIGINT else 128 + number)
    left = subprocess.run(["pgrep", "-f", f"launcher tensorboard {run.name}"], capture_output=True)
    assert not left.stdout
    with pytest.raises(OSError):
        urllib.request.urlopen(address)


def test_init_copies_sets_up_and_checks(cluster, tmp_path, monkeypatch, capfd):
    """Only setup.sh is a short one, as the kit's takes a minute."""
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(tmp_path))
    source, there = tmp_path / "source", tmp_path / "my&kit"
    for part in ("configs", "launcher", "runspec", "slurm", "templates"):
        shutil.copytree(kit.paths.REPO_ROOT / part, source / part)
    (source / "setup.sh").write_text('echo "set up with $*" >&2\n')
    (source / "runs.log").write_text("ignored")
    (source / ".gitignore").write_text("*.log\n__pycache__/\n/configs/clusters/default.yaml\n")
    subprocess.run(["git", "init", "-q", source], check=True)
    connection, said = Connection(Host("cluster", str(there)), print), []
    code = install.install(connection, source, "cu126", said.append)
    out, err = capfd.readouterr()
    assert "set up with --torch cu126" in err and said[0] == f"copied the kit to cluster:{there}"
    # There is no Slurm behind these login nodes, which both say.
    assert "no site file is written, because" in err and code == 1 and "Slurm" in out
    assert (there / "launcher/remote/far.py").is_file() and not (there / "runs.log").exists()
    assert said[-3:] == [
        "next:",
        "  fix what doctor found above, then look again with: cookbook doctor",
        "  cookbook submit demo --nodes 2 --watch",
    ]
    assert hosts.chosen(None) == Host("cluster", str(there))
    (source / "setup.sh").write_text("exit 3\n")
    (source / "launcher/remote/far.py").unlink()
    (there / "configs/recipes/own.yaml").write_text("extends: demo\n")
    with pytest.raises(RemoteFault, match=r"setup\.sh failed on cluster"):
        install.install(connection, source, None, said.append)
    for host, fault in (
        (
            Host("cluster", str(source / "setup.sh")),
            r"cannot copy the kit to \S+ on cluster: mkdir",
        ),
        (Host("cluster.invalid"), "cannot connect to cluster.invalid: ssh: .*: see why with: ssh"),
    ):
        with pytest.raises(RemoteFault, match=fault):
            install.install(Connection(host, print), source, None, said.append)
    with pytest.raises(UsageFault, match="this is none"):
        install.install(connection, tmp_path, None, said.append)
