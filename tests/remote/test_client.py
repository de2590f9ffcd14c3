"""The laptop's side alone: what it imports, reads and sends, and how words become the cluster's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import paths
from launcher.errors import RemoteFault, UsageFault
from launcher.remote import client, hosts, tree


def test_the_client_needs_only_click_and_yaml(tmp_path):
    absent = (
        "torch", "transformers", "datasets", "tensorboard", "huggingface_hub", "jinja2", "rich",
    )  # fmt: skip
    code = f"""
import sys
for name in {absent!r}:
    sys.modules[name] = None
import launcher.cli, launcher.cli.remote
from launcher.remote import client, hosts, install, ssh, tree
launcher.cli.main()
"""
    for words, status, printed in (
        (["fetch", "--help"], 0, "--adapter"),
        (["status"], 2, "status runs on a cluster: cookbook --host NAME status"),
    ):
        env = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(paths.REPO_ROOT)}
        argv = [sys.executable, "-c", code, *words]
        done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == status and printed in done.stdout + done.stderr, done.stderr


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
    with pytest.raises(UsageFault, match="may have host: NAME"):
        hosts.chosen(None)


@pytest.mark.parametrize(
    ("typed", "sent", "target"),
    [
        (["report", "last"], ["report", "last"], ("-o", "report.html")),
        (["report", "a", "-o", "x/r.html"], ["report", "a"], ("-o", "x/r.html")),
        (["start", "a/faq.csv", "m"], ["start", "a/faq.csv", "m"], ("-o", "faq.yaml")),
        (["query", "--output=x/a.jsonl", "m"], ["query", "m"], ("--output", "x/a.jsonl")),
        (["status", "last"], ["status", "last"], None),
        (["report", "--help"], ["report", "--help"], None),
    ],
)
def test_files_for_this_machine_are_written_where_they_can_be_fetched(typed, sent, target):
    words, *found = client._output(typed)
    assert words == sent and found == [target[0], Path(target[1])] if target else not found[1]


def test_outside_git_only_what_is_named_is_sent(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.csv", "secret", "c.yaml"):
        Path(name).write_text("dataset: {data_files: a.csv}\nscript: 'script:../x.py'\n")
    found, words = tree.collect(["submit", "c.yaml", "--data=[a.csv]", "epochs=2", "demo"])
    assert words == ["submit", "c.yaml", "--data=[a.csv]", "epochs=2", "demo"]
    assert found.files == {tmp_path / "a.csv", tmp_path / "c.yaml"}
    found, _ = tree.collect(["submit", "demo"])
    assert not found.files
    # Below the folder of what is sent, relative paths stay as they are.
    outside = tmp_path.parent / f"{tmp_path.name}.csv"
    outside.write_text("a\n")
    for word in (outside, f"../{outside.name}"):
        found, words = tree.collect(["check", "demo", f"dataset.data_files={word}"])
        assert words[2] == f"dataset.data_files=../{outside.name}"
        assert found.files == {outside}


def test_no_link_of_a_clone_leads_out_of_it(tmp_path, monkeypatch):
    """Neither by git's list, nor named in a recipe, nor on the command line."""
    clone, key = tmp_path / "clone", tmp_path / "home" / "id_rsa"
    for folder in (clone / "data", key.parent):
        folder.mkdir(parents=True)
    key.write_text("private")
    (clone / "data" / "a.csv").write_text("a\n1\n")
    (clone / "inside").symlink_to("data/a.csv")
    for name in ("notes.txt", "tracked.csv"):
        (clone / name).symlink_to("../home/id_rsa")
    (clone / "folder").symlink_to("../home")
    named = "{data_files: [notes.txt, folder/id_rsa, ../home/id_rsa, data/a.csv]}"
    (clone / "own.yaml").write_text(f"dataset: {named}\n")
    subprocess.run(["git", "init", "-q", clone], check=True)
    subprocess.run(["git", "-C", clone, "add", "-A"], check=True)
    monkeypatch.chdir(clone)
    found, _ = tree.collect(["submit", "own.yaml", "--data=tracked.csv", "x=folder/id_rsa"])
    assert found.files == {clone / name for name in ("data/a.csv", "inside", "own.yaml")}
    assert sum("name the file itself" in line for line in found.left_out) == 2


def test_a_name_that_the_cluster_gives_is_one_folder_here():
    assert client._plain("20261122-151728-demo-abcd") == "20261122-151728-demo-abcd"
    for name in ("../home", "/home/me/.ssh", ".", "..", "", "-x", "a/b", "a\n", "a\x1b[2J"):
        with pytest.raises(RemoteFault, match="no folder's name"):
            client._plain(name)
