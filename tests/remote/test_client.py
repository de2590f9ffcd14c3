"""The laptop's side alone: what it imports, reads and sends, and how words become the cluster's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import paths, yamlfile
from launcher import site as sites
from launcher.errors import RemoteFault, UsageFault
from launcher.executors.slurm import Nodes, Partition
from launcher.remote import client, hosts, site_file, tree
from launcher.remote.client import _output_there
from runspec.keys.key import faults


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
    with pytest.raises(UsageFault, match="did you mean host"):
        hosts.chosen(None)


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
    assert sorted(found.files) == ["a.csv", "c.yaml"]
    found, _ = tree.collect(["submit", "demo"])
    assert not found.files
    found, _ = tree.collect(["query", "a", "--output", "{out}/b.jsonl"])
    assert not found.left_out


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
    assert sorted(found.files) == ["data/a.csv", "inside", "own.yaml"]
    assert key not in found.files.values()
    assert sum("name the file itself" in line for line in found.left_out) == 2
    with tree.staged(found.files) as folder:
        assert (folder / "inside").read_text() == "a\n1\n"


def test_a_name_that_the_cluster_gives_is_one_folder_here():
    assert client._plain("20261122-151728-demo-abcd") == "20261122-151728-demo-abcd"
    for name in ("../home", "/home/me/.ssh", ".", "..", "", "-x", "a/b", "a\n", "a\x1b[2J"):
        with pytest.raises(RemoteFault, match="no folder's name"):
            client._plain(name)


def test_what_the_cluster_prints_has_the_names_of_this_machine(tmp_path):
    found = tree.Tree(tmp_path, "a", {".elsewhere/ab/d.csv": Path("/mine/d.csv")})
    shown = client._Shown("c" * 16, "e" * 64, found, Path("out/r.html"))
    there = f"/s/sent-7/trees/{'e' * 64}"
    text = f"{there}/a/../.elsewhere/ab/d.csv {there}/x /s/sent-7/calls/{'c' * 16}/out/r.html"
    assert shown.text(text.encode()).decode() == f"/mine/d.csv {tmp_path}/x out/r.html"
    # Where a server listens, in any number of parts; only with this call's own mark.
    said = b"a\x1b[1m\x1eno\n\x1e" + b"c" * 16 + b" n1 6006 /x/?a=b\nend"
    for size in (1, 7, len(said)):
        shown = client._Shown("c" * 16, "", found, None)
        parts = [said[at : at + size] for at in range(0, len(said), size)]
        assert b"".join(map(shown.text, [*parts, b""])) == b"a\x1b[1m\x1eno\nend"
        assert shown.listens and shown.listens.groups() == (b"n1", b"6006", b"/x/?a=b")
    for other in ("d" * 16 + " n1 6006 /", "c" * 16 + " n1 6006 /\x1b]0;x"):
        shown = client._Shown("c" * 16, "", found, None)
        shown.text(f"\x1e{other}\n".encode())
        assert not shown.listens


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
