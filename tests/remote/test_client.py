"""The laptop's side alone: what it imports, reads and sends, and how words become the cluster's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import paths
from launcher.errors import UsageFault
from launcher.remote import chosen, client
from launcher.remote.ssh import Connection
from launcher.remote.tree import Tree


def test_the_client_needs_only_click(tmp_path):
    absent = (
        "torch", "transformers", "datasets", "tensorboard", "huggingface_hub", "jinja2", "rich",
        "yaml",
    )  # fmt: skip
    code = f"""
import sys
for name in {absent!r}:
    sys.modules[name] = None
import launcher.cli, launcher.cli.remote
from launcher.remote import client, ssh, tree
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


def test_a_host_is_a_name_of_ssh_and_a_folder(monkeypatch):
    monkeypatch.delenv("COOKBOOK_HOST", raising=False)
    assert chosen(None) is None
    monkeypatch.setenv("COOKBOOK_HOST", "a:~/kit")
    assert (chosen(None), chosen("b"), chosen("local")) == ("a:~/kit", "b", None)
    for given in ("-oProxyCommand=x", ":/kit"):
        with pytest.raises(UsageFault, match="give a name from your ssh configuration"):
            chosen(given)
    monkeypatch.setenv("COOKBOOK_SSH", "true")
    for given, kit in (("a:~/kit", "kit"), ("b", "slurm-cookbook"), ("c:/s/kit", "/s/kit")):
        connection = Connection(given)
        assert (connection.name, connection.kit) == (given[0], kit)


@pytest.mark.parametrize(
    ("typed", "file"),
    [
        ("report a", None),
        ("report a -o x/r.html", "x/r.html"),
        ("start a/faq.csv m", "faq.yaml"),
        ("query --output=x/a.jsonl m", "x/a.jsonl"),
    ],
)
def test_files_for_this_machine_are_known_by_their_names(typed, file):
    assert client._written(typed.split()) == (Path.cwd() / file if file else None)


def test_outside_git_only_what_is_named_is_sent(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.csv", "secret", "c.yaml"):
        Path(name).write_text("dataset: {data_files: a.csv}\nscript: 'script:../x.py'\n")
    found = Tree(["submit", "c.yaml", "--data=[a.csv]", "epochs=2", "demo"])
    assert found.words == ["submit", "c.yaml", "--data=[a.csv]", "epochs=2", "demo"]
    assert found.files == {tmp_path / "a.csv", tmp_path / "c.yaml"}
    assert not Tree(["submit", "demo"]).files
    # Below the folder of what is sent, relative paths stay as they are.
    outside = tmp_path.parent / f"{tmp_path.name}.csv"
    outside.write_text("a\n")
    for word in (outside, f"../{outside.name}"):
        found = Tree(["check", "demo", f"dataset.data_files={word}"])
        assert found.words[2] == f"dataset.data_files=../{outside.name}"
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
    found = Tree(["submit", "own.yaml", "--data=tracked.csv", "x=folder/id_rsa"])
    # Links are sent as links, and never what they lead to.
    sent = [path for path in found.files if not path.is_symlink()]
    assert sorted(sent) == [clone / "data/a.csv", clone / "own.yaml"]
    assert sum("name the file itself" in line for line in found.left_out) > 2
