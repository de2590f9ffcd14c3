"""The laptop's side alone: what it imports, what it reads, how its words become the cluster's."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import paths, yamlfile
from launcher import site as sites
from launcher.errors import UsageFault
from launcher.executors.slurm import Nodes, Partition
from launcher.remote import hosts, site_file, ssh, tree, wire
from launcher.remote.client import _output_there
from launcher.runs.directory import Run
from runspec.keys.key import faults

# What Windows lacks, and what the light half does not install.
ABSENT = (
    "fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty",
    "torch", "transformers", "datasets", "tensorboard", "huggingface_hub", "jinja2", "rich",
)  # fmt: skip
ABSENT_IN_OS = (
    "chown", "fork", "forkpty", "getegid", "geteuid", "getgid", "getpgid", "getuid", "killpg",
    "mkfifo", "nice", "openpty", "setsid", "statvfs", "uname",
)  # fmt: skip
WINDOWS_SIGNALS = ("SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM")
# Instead of ssh: no master connection, and the command runs here.
SSH = """
import subprocess, sys
if "-O" in sys.argv: sys.exit(255)
if "-G" not in sys.argv: sys.exit(subprocess.run(["bash", "-c", sys.argv[-1]]).returncode)
"""


@pytest.mark.parametrize(
    ("words", "status", "printed"),
    [
        (["fetch", "--help"], 0, "--adapter"),
        (["status"], 2, "status runs on a cluster: cookbook --host NAME status"),
        pytest.param(["--host", "a", "status"], 0, "no run in", marks=pytest.mark.long),
        pytest.param(
            ["--host", "a", "fetch", "last", "--logs"],
            0,
            "1 files, 0.0 MiB, verified by SHA-256",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ["--host", "a", "check", "none.yaml"],
            2,
            r"there is no 'nothing' for /\S*client_needs\S*/none.yaml:",
            marks=pytest.mark.long,
        ),
    ],
)
def test_the_client_needs_only_click_and_yaml_on_any_system(tmp_path, words, status, printed):
    """Commands on the cluster, the tree that is sent, and Ctrl-C, without what is posix alone."""
    code = f"""
import os, signal, sys
for name in {ABSENT!r}:
    sys.modules[name] = None
for name in {ABSENT_IN_OS!r}:
    delattr(os, name)
for name in [name for name in dir(signal) if name.startswith("SIG") and name[3] != "_"]:
    if name not in {WINDOWS_SIGNALS!r}:
        delattr(signal, name)
import launcher.cli, launcher.cli.remote
from launcher.remote import client, fetch, hosts, install, ports, ssh, tree
launcher.cli.main()
"""
    (tmp_path / "ssh.py").write_text(SSH)
    (tmp_path / ".config/slurm-cookbook").mkdir(parents=True)
    (tmp_path / ".config/slurm-cookbook/config.yaml").write_text(f"kits: {{a: {paths.REPO_ROOT}}}")
    (tmp_path / "none.yaml").write_text("extends: nothing\n")
    if "fetch" in words:
        made = Run(tmp_path / "shared" / "runs" / "20261122-151728-demo-abcd")
        (made.path / "logs").mkdir(parents=True)
        (made.path / "logs" / "job.log").write_text("one line\n")
        made.write("submission.json", {"recipe": "demo", "jobs": [], "asked": {}})
    env = {
        **os.environ,
        "HOME": str(tmp_path),
        "COOKBOOK_ROOT": str(tmp_path / "shared"),
        "COOKBOOK_VENV": sys.prefix,
        "COOKBOOK_SSH": f"{sys.executable} {tmp_path / 'ssh.py'}",
        "PYTHONPATH": str(paths.REPO_ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == status, done.stderr
    assert re.search(printed, done.stdout + done.stderr), done.stderr


def test_the_users_file_names_the_host(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("COOKBOOK_HOST", raising=False)
    assert hosts.chosen(None) is None
    assert hosts.chosen("a") == hosts.Host("a", "slurm-cookbook")
    hosts.remember(hosts.Host("b", "/shared/kit"))
    assert hosts.chosen(None) == hosts.chosen("b") == hosts.Host("b", "/shared/kit")
    assert hosts.chosen("local") is None
    with pytest.raises(UsageFault, match="give a name from your ssh configuration"):
        hosts.chosen("-oProxyCommand=x")
    hosts.FILE.expanduser().write_text("hots: b\n")
    with pytest.raises(UsageFault, match="did you mean host"):
        hosts.chosen(None)


def test_records_are_the_same_however_they_are_cut():
    whole = b"".join(wire.record(kind, bytes([kind]) * kind) for kind in (1, 2, 0, 300 % 256))
    for size in (1, 3, 7, len(whole)):
        records, found = wire.Records(), []
        for start in range(0, len(whole), size):
            found += records.feed(whole[start : start + size])
        assert found == [(1, b"\1"), (2, b"\2\2"), (0, b""), (44, bytes([44]) * 44)]


@pytest.mark.parametrize(
    ("typed", "sent", "target"),
    [
        (["report", "last"], ["report", "last", "-o", "{out}/report.html"], "report.html"),
        (["report", "a", "-o", "x/r.html"], ["report", "a", "-o", "{out}/r.html"], "x/r.html"),
        (
            ["start", "a/faq.csv", "m"],
            ["start", "a/faq.csv", "m", "-o", "{out}/faq.yaml"],
            "faq.yaml",
        ),
        (["status", "last"], ["status", "last"], None),
        (["report", "--help"], ["report", "--help"], None),
    ],
)
def test_files_for_this_machine_are_written_where_they_can_be_fetched(typed, sent, target):
    assert _output_there(typed) == (sent, target and Path(target))


def test_outside_git_only_what_is_named_is_sent(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.csv", "secret", "c.yaml"):
        Path(name).write_text("dataset: {data_files: a.csv}\nscript: 'script:../x.py'\n")
    found, words = tree.collect(["submit", "c.yaml", "--data=[a.csv]", "epochs=2", "demo"])
    assert words == ["submit", "c.yaml", "--data=[a.csv]", "epochs=2", "demo"]
    assert sorted(found.files) == ["a.csv", "c.yaml"] and not found.kit
    found, _ = tree.collect(["submit", "demo"])
    assert not found.files
    found, _ = tree.collect(["query", "a", "--output", "{out}/b.jsonl"])
    assert not found.left_out


def test_windows_paths_in_the_name_of_the_ssh_program(monkeypatch):
    monkeypatch.setattr(ssh, "_WINDOWS", True)
    monkeypatch.setattr(ssh.shutil, "which", lambda program: program)
    monkeypatch.setenv("COOKBOOK_SSH", r'"C:\Program Files\OpenSSH\ssh.exe" -F C:\me\config')
    wanted = [r"C:\Program Files\OpenSSH\ssh.exe", "-F", r"C:\me\config", "-T"]
    assert ssh.Connection(hosts.Host("a"), print).argv("true")[:4] == wanted


def test_the_kits_own_checkout_is_sent_with_its_commit(monkeypatch):
    monkeypatch.chdir(paths.REPO_ROOT / "docs")
    found, words = tree.collect(["submit", "../configs/recipes/demo.yaml"])
    assert found.kit and found.cwd == "docs" and words[1] == "../configs/recipes/demo.yaml"
    assert {"launcher/__init__.py", "setup.sh"} <= set(found.files)
    assert b'"commit"' in found.texts["origin.json"]
    assert not any(name.startswith((".venv", "runs/")) for name in found.files)


def test_the_site_file_says_what_sinfo_says():
    def partition(name: str, default: bool, *kinds: tuple[int, dict[str, int]]) -> Partition:
        nodes = tuple(Nodes(count, found, 512000, 64) for count, found in kinds)
        return Partition(name, "1-00:00:00", default, True, nodes)

    all_ = [
        partition("cpu", True, (40, {})),
        partition("gpu", False, (8, {"a100": 4}), (2, {"h100": 8})),
        partition("old", False, (2, {"": 2})),
    ]
    named = {each.name: each for each in all_}
    made = site_file.text(named, ["mine"])
    known = yamlfile.parse(made, "made")
    wanted = {"partition": "gpu", "account": "mine", "gpu_type": "a100"}
    assert known == {"resources": wanted, "gpu": "a100-40"}
    assert "#   gpu: 8 nodes with 4 x a100, 2 nodes with 8 x h100; at most 1-00:00:00" in made
    two = site_file.text({"old": named["old"]}, ["a", "b"])
    assert yamlfile.parse(two, "made") == {"resources": {"partition": "old"}}
    assert "# account: choose one of a, b" in two
    assert not list(faults(known, sites.KEYS))
