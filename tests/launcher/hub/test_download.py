"""cookbook download against a hub of our own: real client, real files, every fault in one line."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import site as clusters
from launcher.recipe import load as recipe_file
from launcher.run import provenance
from tests.launcher.hub.hub_server import Hub, Repository, serving
from tests.launcher.kit import FAKE_TOKEN, Kit

RECIPE = """
extends: demo
prepare: null
hub: {model: acme/tiny-llama, dataset: acme/questions}
checkpointer: {checkpoint_dir: "${models_root}/tiny", checkpoint_files: [model.safetensors]}
tokenizer: {path: "${checkpointer.checkpoint_dir}/original/tokenizer.model"}
"""
# The client writes 10 MiB at a time: a cut has to come later than that for it to go on there.
WEIGHTS = os.urandom(24_000_000)


@pytest.fixture
def hub():
    """A hub with a gated model, which alice may read, and a dataset."""
    model = Repository(
        {
            "config.json": b'{"hidden_size": 8}',
            "model.safetensors": WEIGHTS,
            "pytorch_model.bin": b"a pickle",
            "original/tokenizer.model": b"words " * 100,
            "original/consolidated.00.pth": b"a pickle",
            "README.md": b"# Tiny",
        },
        gated=True,
    )
    rows = [{"question": f"q{k}", "answer": f"a{k}"} for k in range(5)]
    data = Repository({"train.jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode()})
    repositories = {("models", "acme/tiny-llama"): model, ("datasets", "acme/questions"): data}
    with serving(repositories, {FAKE_TOKEN: "alice", "hf_other": "bob"}) as running:
        running.members.add("alice")
        yield running


@pytest.fixture
def alice(user: Kit, hub: Hub, tmp_path) -> Kit:
    """A user of that hub with a token and no other login."""
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    env = {key: value for key, value in user.env.items() if not key.startswith("HF_")}
    env |= {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "login"), "NO_PROXY": "127.0.0.1"}
    return Kit({**env, "HF_TOKEN": FAKE_TOKEN}, user.root)


def download(kit: Kit, tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return kit.cookbook("download", str(tmp_path / "tiny.yaml"), *arguments)


def model_of(hub: Hub) -> Repository:
    return hub.repositories["models", "acme/tiny-llama"]


@pytest.mark.long
def test_a_cut_connection_a_broken_file_and_a_second_call(alice: Kit, hub: Hub, tmp_path):
    model = model_of(hub)
    model.cut["model.safetensors"] = 1
    done = download(alice, tmp_path)
    assert done.returncode == 0, done.stderr
    folder = alice.root / "models" / "tiny"
    names = {"config.json", "model.safetensors", "original/tokenizer.model", "README.md"}
    for name in names:
        assert (folder / name).read_bytes() == model.files[name]
    # Pickles stay where they are; the cut file went on at the byte where it was cut.
    assert not {"pytorch_model.bin", "original/consolidated.00.pth"} & set(hub.fetched())
    resumed = [line for line in hub.requests if line.endswith("model.safetensors")]
    assert resumed[-1].startswith("GET file from "), hub.requests

    record = json.loads((folder / "cookbook-download.json").read_text())
    assert record["repo"] == "acme/tiny-llama" and record["revision"] == model.sha
    recipe = recipe_file.load(str(tmp_path / "tiny.yaml"))
    site = clusters.Site(shared_root=str(alice.root))
    assert provenance._model_revision(recipe, site)["revision"] == model.sha

    # A job, with the HF_HOME that job scripts set and no network, reads the dataset; here on a
    # cluster without internet, where hf/ was carried to.
    carried = tmp_path / "carried"
    shutil.copytree(alice.root / "hf", carried, symlinks=True)
    program = (
        "import datasets; print(datasets.load_dataset('acme/questions')['train'][4]['answer'])"
    )
    read = subprocess.run(
        [sys.executable, "-c", program],
        env={**alice.env, "HF_HOME": str(carried), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert read.stdout.strip() == "a4", read.stderr
    assert hub.fetched().count("train.jsonl") == 1

    # A byte that changed on the disk is found, and that file alone is fetched by the next call.
    hub.requests.clear()
    weights = folder / "model.safetensors"
    before = weights.stat().st_mtime
    with open(weights, "r+b") as file:
        file.write(bytes([WEIGHTS[0] ^ 1]))
    os.utime(weights, (before, before))  # as a disk would do it
    (folder / "config.json").unlink()
    told = "1 of the files of acme/tiny-llama, first model.safetensors, differ from the hub's index"
    refused(download(alice, tmp_path), told)
    done = download(alice, tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(hub.fetched()) == ["config.json", "model.safetensors"]
    assert weights.read_bytes() == WEIGHTS

    # The token went to the hub alone.
    assert FAKE_TOKEN not in done.stdout + done.stderr
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or FAKE_TOKEN.encode() not in path.read_bytes(), path


def test_a_teacher_comes_with_its_student(alice: Kit, hub: Hub, tmp_path):
    own = ["entry=distill", "~loss", "hub.teacher=acme/tiny-llama@main"]
    done = download(alice, tmp_path, own[2])
    assert done.returncode == 2 and "names no folder for hub.teacher: set entry" in done.stderr
    own += ["teacher=${models_root}/large", "~hub.dataset"]
    done = download(alice, tmp_path, *own)
    assert done.returncode == 0, done.stderr
    tiny, large = (alice.root / "models" / name for name in ("tiny", "large"))
    assert (large / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()
    done = download(alice, tmp_path, *own, "hub.teacher=acme/tiny-lama")
    refused(done, "no model 'acme/tiny-lama': fix hub.teacher in")


def test_a_broken_dataset_is_fetched_again(alice: Kit, hub: Hub, tmp_path):
    assert download(alice, tmp_path, "~hub.model").returncode == 0
    hub.requests.clear()
    data = next((alice.root / "hf" / "hub").glob("datasets--*/snapshots/*/train.jsonl"))
    whole = data.read_bytes()
    data.write_bytes(whole[:-1] + b"x")
    refused(
        download(alice, tmp_path, "~hub.model"), "1 of the files of acme/questions, first train"
    )
    done = download(alice, tmp_path, "~hub.model")
    assert done.returncode == 0, done.stderr
    assert hub.fetched() == ["train.jsonl"] and data.read_bytes() == whole


def refused(done: subprocess.CompletedProcess[str], *told: str) -> None:
    faults = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1 and done.stdout == "", done.stdout + done.stderr
    assert "Traceback" not in done.stderr and len(faults) == len(told), done.stderr
    for fault, words in zip(faults, told, strict=True):
        assert words in fault


def test_access_that_is_missing(alice: Kit, hub: Hub, tmp_path):
    page = f"is gated: ask for access at {hub.address}/acme/tiny-llama"
    nobody = Kit({k: v for k, v in alice.env.items() if k != "HF_TOKEN"}, alice.root)
    refused(download(nobody, tmp_path), f"{page}, then log in with: hf auth login")
    token = tmp_path / "token"
    token.write_text("hf_other")
    bob = Kit({**nobody.env, "HF_TOKEN_PATH": str(token)}, alice.root)
    refused(download(bob, tmp_path), f"{page}, then see whose token you use: hf auth whoami")
    old = Kit({**alice.env, "HF_TOKEN": "hf_expired"}, alice.root)
    # For model and dataset alike: one fault.
    refused(download(old, tmp_path), "the hub does not accept your token: make one")
    assert hub.fetched() == [] and not (alice.root / "models").exists()


def test_names_that_lead_nowhere_are_all_told(alice: Kit, hub: Hub, tmp_path):
    done = download(alice, tmp_path, "hub.model=acme/tiny-lama", "hub.dataset=acme/answers")
    refused(
        done,
        "no model 'acme/tiny-lama': fix hub.model in the recipe",
        "no dataset 'acme/answers': fix hub.dataset in the recipe",
    )
    done = download(alice, tmp_path, "hub.model=acme/tiny-llama@v7")
    refused(done, "acme/tiny-llama has no revision 'v7'")
    done = download(alice, tmp_path, "checkpointer.checkpoint_files=[model-1.safetensors]")
    refused(done, "first model-1.safetensors, are not in the repository (did you mean model.saf")
    assert hub.fetched() == []


def test_pickles_are_never_fetched(alice: Kit, hub: Hub, tmp_path):
    pickled = ["checkpointer.checkpoint_files=[pytorch_model.bin]", "~hub.dataset"]
    refused(download(alice, tmp_path, *pickled), "first pytorch_model.bin, are pickles")
    model_of(hub).files = {"weights.bin": b"a pickle"}
    bare = ["~checkpointer.checkpoint_files", "tokenizer.path=/elsewhere", "~hub.dataset"]
    refused(download(alice, tmp_path, *bare), "acme/tiny-llama has only pickles, which can run")
    model_of(hub).files = {"../evil.json": b"{}"}
    refused(download(alice, tmp_path, *bare), "acme/tiny-llama names the file '../evil.json'")


def test_a_disk_too_small_and_a_hub_that_sends_wrong_bytes(alice: Kit, hub: Hub, tmp_path):
    model = model_of(hub)
    model.claimed_size["model.safetensors"] = 10**18
    refused(download(alice, tmp_path), "GiB free: make room, or set COOKBOOK_ROOT")
    model.claimed_size.clear()
    model.corrupt["model.safetensors"] = 1
    done = download(alice, tmp_path, "~hub.dataset")
    refused(done, "first model.safetensors, differ from the hub's index, and were removed")
    assert not (alice.root / "models" / "tiny" / "cookbook-download.json").exists()


def test_no_network_and_nothing_to_download(alice: Kit, tmp_path):
    offline = Kit({**alice.env, "HF_ENDPOINT": "http://127.0.0.1:9"}, alice.root)
    done = download(offline, tmp_path, "~hub.dataset")
    refused(done, "no answer from http://127.0.0.1:9")
    done = alice.cookbook("download", "demo")
    assert done.returncode == 2 and "recipe demo has no hub: block" in done.stderr
    done = download(alice, tmp_path, "hub.model=../evil")
    assert done.returncode == 2 and "a Hub repository such as org/name" in done.stderr
