"""Fetching the files of a repository, verifying and recording them; a dataset's tables."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants

from launcher import paths, venv
from launcher.errors import HubFault
from launcher.hub.repository import Repository, Say
from launcher.recipe.model import Recipe
from launcher.site import Site
from runspec import lock
from runspec.files import sha256, write_text

# The age from which a part of a file counts as left behind, not as being written.
_LEFTOVER_S = 600
# What a dataset block may hold that changes which tables are made of the files.
_LOAD_KEYS = ("name", "data_dir", "data_files", "revision")

_LOAD = """
import json, sys
from datasets import load_dataset
repo, options = json.loads(sys.argv[1])
print({name: len(split) for name, split in load_dataset(repo, **options).items()})
"""


def find_missing(repository: Repository) -> None:
    """Note which files are not there yet, by the client's dry run."""
    # It makes the folders: if there is none, no file is there. It waits for files that another
    # download is writing.
    if repository.place.exists():
        with _alone(repository):
            dry = repository.snapshot(repository.commit, dry_run=True)
        repository.missing = {file.filename for file in dry if file.will_download}


def fetch(repository: Repository, again: str, say: Say) -> Path:
    """Fetch what is missing, verify every file, fetch broken ones once more, write the record.

    again: the command that goes on after Ctrl-C.
    """
    count = len(repository.files)
    # A dataset's cache notes which commit its branch led to; jobs look there when offline.
    revision = repository.commit if repository.kind == "model" else repository.revision
    with _interruptible(again), _alone(repository):
        repository.snapshot(revision)
        if broken := _broken(repository):
            say(f"{len(broken)} of {count} files differ from the hub's index: fetched again")
            for path in (repository.place / name for name in broken):
                path.resolve().unlink(missing_ok=True)
                path.unlink(missing_ok=True)
            repository.snapshot(revision)
            broken = _broken(repository)
        if broken:
            message = f"{len(broken)} of the files of {repository.name}, first {broken[0]}, differ"
            remedy = "a proxy or the disk may be at fault; try again later"
            raise HubFault(f"{message} from the hub's index twice in a row: {remedy}")
        record = repository.folder / paths.DOWNLOAD_RECORD
        write_text(record, json.dumps(_record(repository), indent=1) + "\n", mode=0o644)
    say(f"{repository.name}: all {count} files are whole; recorded in {record}")
    return record


def _broken(repository: Repository) -> list[str]:
    """Return the files that are missing or differ from the hub's checksums."""
    kind, commit, folder = repository.kind, repository.commit, repository.place
    verified = HfApi().verify_repo_checksums(
        repository.name, repo_type=kind, revision=commit, local_dir=folder
    )
    wrong = {each["path"] for each in verified.mismatches}.union(verified.missing_paths)
    return [name for name in repository.files if name in wrong]


def _record(repository: Repository) -> dict[str, Any]:
    paths = {name: repository.place / name for name in repository.files}
    return {
        "repo": repository.name,
        "kind": repository.kind,
        "revision": repository.commit,
        "asked_for": repository.revision,
        "checked": time.time(),
        "files": {
            name: {
                "size": file.size,
                "sha256": file.lfs.sha256 if file.lfs else sha256(paths[name]),
                # Of the file that was verified: unchanged, it need not be hashed again.
                "mtime_ns": paths[name].stat().st_mtime_ns,
            }
            for name, file in repository.files.items()
        },
    }


@contextmanager
def _alone(repository: Repository) -> Iterator[None]:
    """Keep other downloads out of the folder meanwhile, and remove what a killed one left."""
    # Where the hub's client keeps unfinished files.
    inside = "blobs" if repository.kind == "dataset" else ".cache/huggingface/download"
    folder = repository.folder / inside
    folder.mkdir(parents=True, exist_ok=True)
    try:
        held = lock.take(folder / ".cookbook.lock")
    except lock.Held as error:
        message = f"another download is writing to {repository.folder} ({error})"
        raise HubFault(f"{message}: wait until it ends, then try again") from error
    with held:
        for file in folder.rglob("*.incomplete"):
            if time.time() - file.stat().st_mtime > _LEFTOVER_S:
                file.unlink(missing_ok=True)
        yield


@contextmanager
def _interruptible(again: str) -> Iterator[None]:
    """End at once on Ctrl-C: the client's threads would first finish the files they are at."""

    def end(number: int, _: object) -> None:
        message = f"interrupted; finished files stay: go on with: {again}\n"
        os.write(2, f"\nerror: {message}".encode())
        os._exit(128 + number)

    before = {each: signal.signal(each, end) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def make_tables(recipe: Recipe, cluster: Site, repository: Repository, say: Say) -> None:
    """Load the dataset in the virtual environment, with the HF_HOME that jobs have.

    Its tables are made here and once, so that nodes can be offline.
    """
    block = recipe.resolved(cluster.root, "run").get("dataset")
    block = block if isinstance(block, dict) else {}
    options = {}
    if block.get("source") in (None, repository.name):
        options = {key: block[key] for key in _LOAD_KEYS if block.get(key) is not None}
    if repository.revision != "main":
        options["revision"] = repository.revision
    caches = ("HF_HUB_CACHE", "HF_DATASETS_CACHE", "HUGGINGFACE_HUB_CACHE")
    variables = {key: value for key, value in os.environ.items() if key not in caches}
    variables["HF_HOME"] = str(cluster.root / "hf")
    # The login's own token is in the folder that HF_HOME now hides.
    variables["HF_TOKEN_PATH"] = constants.HF_TOKEN_PATH
    say(f"making the tables of {repository.name} in {cluster.root / 'hf' / 'datasets'}")
    argv = [str(venv.python()), "-c", _LOAD, json.dumps([repository.name, options])]
    done = subprocess.run(
        argv, cwd="/", env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        named = re.findall(r"^[\w.]*(?:Error|Exception)\b.*", done.stderr, re.MULTILINE)
        why = (named or done.stderr.strip().splitlines() or ["no message"])[-1]
        message = (
            f"the files of {repository.name} are there and whole, but datasets cannot read them"
        )
        remedy = "fix the recipe's dataset block (name, data_dir, data_files), then try again"
        raise HubFault(f"{message}: {why}: {remedy}")
    say(f"{repository.name}: rows {done.stdout.strip()}")
