"""A recipe's model and dataset from the Hugging Face hub to the shared folder, whole and checked.

What is there already is kept, what is missing or broken is fetched, and every file is held against
the hub's index of sizes and hashes. The token is read from HF_TOKEN, from the file that
HF_TOKEN_PATH names or from the hub's own login; it is handed to the hub's client alone.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import paths
from launcher.checks.files import checkpoint_files
from launcher.cluster import Cluster
from launcher.errors import CookbookError, HubFault, RecipeFault, nearest
from launcher.node_check import Finding, failed, ok, skipped
from launcher.recipe import Recipe

Say = Callable[[str], None]

# Pickles can run code when they are opened; original/ holds a second copy of the weights in them.
_PICKLES = (".bin", ".pth", ".pt", ".pkl", ".pickle", ".ckpt", ".joblib")
# The same weights for other frameworks.
_OTHER_WEIGHTS = (".h5", ".msgpack", ".onnx", ".onnx_data", ".gguf", ".tflite", ".ot")
_AT_ONCE = 8
# Somebody else's part of a file is being written, or was left behind, by its age.
_LEFTOVER_S = 600


@dataclass(frozen=True)
class Wanted:
    """A repository to be fetched: its kind is model or dataset, its folder where the files go."""

    kind: str
    repo: str
    revision: str
    folder: Path
    needs: tuple[str, ...] = ()

    @property
    def page(self) -> str:
        from huggingface_hub import constants

        return f"{constants.ENDPOINT}/{'datasets/' if self.kind == 'dataset' else ''}{self.repo}"


@dataclass(frozen=True)
class File:
    """A file as the hub's index has it: large ones by sha256, small ones by git's blob id."""

    name: str
    size: int
    sha256: str | None
    blob_id: str


@dataclass(frozen=True)
class Listing:
    """What is to be fetched of a repository at one commit."""

    wanted: Wanted
    commit: str
    files: list[File]

    @property
    def place(self) -> Path:
        """The folder that holds the files under the names of the repository."""
        if self.wanted.kind == "model":
            return self.wanted.folder
        return self.wanted.folder / "snapshots" / self.commit


def wanted(recipe: Recipe, cluster: Cluster, revision: str | None) -> list[Wanted]:
    """Return what the recipe's hub: block names; RecipeFault where there is nothing to fetch."""
    config = recipe.resolved(cluster.root, "run")
    block = config.get("hub") or {}
    if not block:
        raise RecipeFault(
            f"recipe {recipe.name} has no hub: block, so there is nothing to download: add "
            "hub: {model: ORGANISATION/NAME, dataset: ORGANISATION/NAME} to it, or give "
            "+hub.model=ORGANISATION/NAME"
        )
    found = []
    if block.get("model"):
        repo, at = _split(block["model"])
        checkpointer, tokenizer = config.get("checkpointer") or {}, config.get("tokenizer") or {}
        if not checkpointer.get("checkpoint_dir"):
            raise RecipeFault(
                f"recipe {recipe.name} names no checkpointer.checkpoint_dir for the model to go to"
            )
        folder = Path(str(checkpointer["checkpoint_dir"]))
        named = [tokenizer.get(key) for key in ("path", "vocab_path", "merges_file")]
        inside = [
            str(Path(path).relative_to(folder))
            for path in named
            if path and Path(path).is_relative_to(folder) and Path(path) != folder
        ]
        needs = (*checkpoint_files(checkpointer), *inside)
        found.append(Wanted("model", repo, revision or at, folder, needs))
    if block.get("dataset"):
        repo, at = _split(block["dataset"])
        # Where jobs look, since their HF_HOME is hf/ of the shared root.
        folder = cluster.root / "hf" / "hub" / f"datasets--{repo.replace('/', '--')}"
        found.append(Wanted("dataset", repo, at, folder))
    return found


def _split(name: str) -> tuple[str, str]:
    repo, _, revision = name.partition("@")
    return repo, revision or "main"


def download(
    recipe: Recipe, cluster: Cluster, revision: str | None, allow_pickle: bool, say: Say
) -> list[Path]:
    """Fetch, check and record all that the recipe names; return the records' paths.

    HubFault lists every fault that can be known before the first byte is fetched.
    """
    chosen = wanted(recipe, cluster, revision)
    again = f"cookbook download {recipe.typed}"
    listings, faults = [], []
    for each in chosen:
        try:
            with _hub_faults(each):
                listings.append(_list(each, allow_pickle))
        except HubFault as fault:
            faults += fault.faults
    faults += _no_room(listings)
    if faults:
        raise HubFault(faults)
    records = []
    for listing in listings:
        with _interruptible(again), _hub_faults(listing.wanted), _alone(listing):
            records.append(_fetch(listing, say))
        if listing.wanted.kind == "dataset":
            _prepare_dataset(recipe, cluster, listing, say)
    return records


# What there is to fetch ---------------------------------------------------------------------


def _list(wanted: Wanted, allow_pickle: bool) -> Listing:
    """Ask the hub for the commit and its files, and whether this user may read them."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    api = HfApi()
    info = api.repo_info(wanted.repo, repo_type=wanted.kind, revision=wanted.revision)
    # A gated repository shows its index to everybody and its files to some.
    api.auth_check(wanted.repo, repo_type=wanted.kind)
    tree = api.list_repo_tree(wanted.repo, repo_type=wanted.kind, revision=info.sha, recursive=True)
    whole = [
        File(entry.path, entry.size, entry.lfs.sha256 if entry.lfs else None, entry.blob_id)
        for entry in tree
        if isinstance(entry, RepoFile)
    ]
    files = [file for file in whole if _is_chosen(file.name, wanted, allow_pickle)]
    _refuse_unsafe(files, wanted)
    lacking = [name for name in wanted.needs if name not in {file.name for file in files}]
    if lacking:
        pickles = [name for name in lacking if name in {file.name for file in whole}]
        why = "are pickles, which can run code when opened: --allow-pickle takes them all the same"
        if not pickles:
            hint = nearest(lacking[0], [file.name for file in whole])
            why = f"are not in the repository{hint}: mend the recipe, or choose another --revision"
        raise HubFault(
            f"{len(pickles or lacking)} of the files that the recipe reads from {wanted.repo}, "
            f"first {(pickles or lacking)[0]}, {why}"
        )
    return Listing(wanted, str(info.sha), files)


def _is_chosen(name: str, wanted: Wanted, allow_pickle: bool) -> bool:
    if name in wanted.needs and not name.endswith(_PICKLES):
        return True
    if name.endswith(_PICKLES):
        return allow_pickle and not name.startswith("original/")
    return wanted.kind == "dataset" or not name.endswith(_OTHER_WEIGHTS)


def _refuse_unsafe(files: list[File], wanted: Wanted) -> None:
    """A repository's names must stay inside the folder that they are written to."""
    for file in files:
        if file.name.startswith("/") or ".." in file.name.split("/"):
            raise HubFault(
                f"{wanted.repo} names the file {file.name!r}: do not use that repository"
            )


def _no_room(listings: list[Listing]) -> list[str]:
    """Compare what is still to be fetched with the free room of each filesystem."""
    needed: dict[int, tuple[Path, int]] = {}
    for listing in listings:
        place = listing.wanted.folder
        while not place.exists():
            place = place.parent
        device = place.stat().st_dev
        missing = sum(file.size for file in listing.files if not _has_size(listing, file))
        needed[device] = (place, needed.get(device, (place, 0))[1] + missing)
    return [
        f"{size / 2**30:.1f} GiB are to be fetched and {place} has "
        f"{shutil.disk_usage(place).free / 2**30:.1f} GiB free: make room, or set COOKBOOK_ROOT"
        for place, size in needed.values()
        if size > shutil.disk_usage(place).free
    ]


def _has_size(listing: Listing, file: File) -> bool:
    path = listing.place / file.name
    return path.is_file() and path.stat().st_size == file.size


# Fetching and checking ----------------------------------------------------------------------


def _fetch(listing: Listing, say: Say) -> Path:
    """Fetch what is missing, check every file, fetch broken ones once more, write the record."""
    wanted, files = listing.wanted, listing.files
    missing = [file for file in files if not _has_size(listing, file)]
    total = sum(file.size for file in files)
    say(
        f"{wanted.kind} {wanted.repo} at {listing.commit[:12]}: {len(files)} files, "
        f"{total / 2**30:.2f} GiB, {len(files) - len(missing)} of them there; into {wanted.folder}"
    )
    for path in (listing.place / file.name for file in missing):
        _forget(wanted, path)
    _get(listing, files)
    sums, broken = _check(listing, say)
    if broken:
        say(f"{len(broken)} of {len(files)} files differ from the hub's index: fetched again")
        for file in broken:
            _forget(wanted, listing.place / file.name)
        _get(listing, broken)
        sums, broken = _check(listing, say)
    if broken:
        raise HubFault(
            f"{len(broken)} of the files of {wanted.repo}, first {broken[0].name}, differ from the "
            "hub's index twice in a row: is a proxy or the disk at fault? try again later"
        )
    record = wanted.folder / paths.DOWNLOAD_RECORD
    paths.write_atomic(record, json.dumps(_record(listing, sums), indent=1) + "\n", mode=0o644)
    say(f"{wanted.repo}: all {len(files)} files are whole; noted in {record}")
    return record


def _get(listing: Listing, files: list[File]) -> None:
    """Hand files to the hub's client: it goes on after a cut connection, at the byte."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    wanted = listing.wanted
    where: dict[str, Any] = {"local_dir": wanted.folder}
    if wanted.kind == "dataset":
        where = {"cache_dir": wanted.folder.parent}
    snapshot_download(
        wanted.repo,
        repo_type=wanted.kind,
        # A dataset's cache notes what its branch led to; jobs look there when offline.
        revision=listing.commit if wanted.kind == "model" else wanted.revision,
        allow_patterns=[re.sub(r"([*?[])", r"[\1]", file.name) for file in files],
        max_workers=_AT_ONCE,
        **where,
    )


def _check(listing: Listing, say: Say) -> tuple[dict[str, str], list[File]]:
    """Read every file; return the sha256 of each, and those that are not as the index says."""
    started = time.monotonic()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        sums = list(pool.map(lambda file: _sums(listing.place / file.name), listing.files))
    took = time.monotonic() - started
    if took > 5:
        say(f"checked {len(sums)} files in {took:.0f} s")
    broken = [
        file
        for file, (sha256, blob_id) in zip(listing.files, sums, strict=True)
        if (sha256 if file.sha256 else blob_id) != (file.sha256 or file.blob_id)
    ]
    names = (file.name for file in listing.files)
    return dict(zip(names, (sha256 for sha256, _ in sums), strict=True)), broken


def _sums(path: Path) -> tuple[str, str]:
    """Return a file's sha256 and its blob id, as git counts it: sha1 of a header and the bytes."""
    try:
        size = path.stat().st_size
        sha256, blob = hashlib.sha256(), hashlib.sha1(f"blob {size}\0".encode())
        with path.open("rb") as file:
            while chunk := file.read(2**22):
                sha256.update(chunk)
                blob.update(chunk)
    except FileNotFoundError:
        return "", ""
    return sha256.hexdigest(), blob.hexdigest()


def _forget(wanted: Wanted, path: Path) -> None:
    """Remove a file, and what the hub's client noted of it, so that it is fetched anew."""
    if wanted.kind == "dataset":
        path.resolve().unlink(missing_ok=True)
    else:
        note = _notes(wanted) / f"{path.relative_to(wanted.folder)}.metadata"
        note.unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def _notes(wanted: Wanted) -> Path:
    """Return the folder in which the hub's client keeps its notes and unfinished files."""
    if wanted.kind == "dataset":
        return wanted.folder / "blobs"
    return wanted.folder / ".cache" / "huggingface" / "download"


def _record(listing: Listing, sums: Mapping[str, str]) -> dict[str, Any]:
    return {
        "repo": listing.wanted.repo,
        "kind": listing.wanted.kind,
        "revision": listing.commit,
        "asked_for": listing.wanted.revision,
        "checked": time.time(),
        "files": {
            file.name: {
                "size": file.size,
                "sha256": sums[file.name],
                # Of the file that was hashed: unchanged, it need not be hashed again.
                "mtime_ns": (listing.place / file.name).stat().st_mtime_ns,
            }
            for file in listing.files
        },
    }


@contextmanager
def _alone(listing: Listing) -> Iterator[None]:
    """Keep other downloads out of the folder meanwhile, and remove what a killed one left."""
    folder, notes = listing.wanted.folder, _notes(listing.wanted)
    notes.mkdir(parents=True, exist_ok=True)
    with open(notes / ".cookbook.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise HubFault(
                f"another download is at work in {folder}: wait for its end, then try again"
            ) from error
        for file in notes.rglob("*.incomplete"):
            if time.time() - file.stat().st_mtime > _LEFTOVER_S:
                file.unlink(missing_ok=True)
        yield


@contextmanager
def _interruptible(again: str) -> Iterator[None]:
    """End at once on Ctrl-C: the client's threads would first finish the files they are at."""

    def end(number: int, _: object) -> None:
        words = f"interrupted; finished files stay: go on with: {again}\n"
        os.write(2, f"\nerror: {words}".encode())
        os._exit(128 + number)

    before = {each: signal.signal(each, end) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# The dataset as jobs read it ----------------------------------------------------------------

# What a dataset block may hold that changes which tables are made of the files.
_LOAD_KEYS = ("name", "data_dir", "data_files", "revision")

_LOAD = """
import json, sys
from datasets import load_dataset
repo, options = json.loads(sys.argv[1])
print({name: len(split) for name, split in load_dataset(repo, **options).items()})
"""


def _prepare_dataset(recipe: Recipe, cluster: Cluster, listing: Listing, say: Say) -> None:
    """Make the tables that jobs read, here and once, so that nodes need no internet."""
    block = recipe.resolved(cluster.root, "run").get("dataset")
    block = block if isinstance(block, dict) else {}
    repo = listing.wanted.repo
    options = {}
    if block.get("source") in (None, repo):
        options = {key: block[key] for key in _LOAD_KEYS if block.get(key) is not None}
    if listing.wanted.revision != "main":
        options["revision"] = listing.wanted.revision
    from huggingface_hub import constants

    environment = {
        **os.environ,
        "HF_HOME": str(cluster.root / "hf"),
        # The login's own token lies in the home folder that HF_HOME now hides.
        "HF_TOKEN_PATH": constants.HF_TOKEN_PATH,
    }
    for name in ("HF_HUB_CACHE", "HF_DATASETS_CACHE", "HUGGINGFACE_HUB_CACHE"):
        environment.pop(name, None)
    say(f"making the tables of {repo} in {cluster.root / 'hf' / 'datasets'}")
    done = subprocess.run(
        [
            str(paths.venv_root() / "bin" / "python"),
            "-c",
            _LOAD,
            json.dumps([repo, options]),
        ],
        cwd="/",
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        named = re.findall(r"^[\w.]*(?:Error|Exception)\b.*", done.stderr, re.MULTILINE)
        words = (named or done.stderr.strip().splitlines() or ["no message"])[-1]
        raise HubFault(
            f"the files of {repo} are there and checked, but datasets cannot read them: {words}: "
            "mend the recipe's dataset block (name, data_dir, data_files), then try again"
        )
    say(f"{repo}: rows {done.stdout.strip()}")


# Faults -------------------------------------------------------------------------------------


@contextmanager
def _hub_faults(wanted: Wanted) -> Iterator[None]:
    """Turn what the hub's client raises into one line with the next command."""
    from huggingface_hub import errors

    try:
        yield
    except CookbookError:
        raise
    except (errors.GatedRepoError, errors.RepositoryNotFoundError) as error:
        raise HubFault(_no_access(wanted, error)) from error
    except errors.RevisionNotFoundError as error:
        raise HubFault(
            f"{wanted.repo} has no revision {wanted.revision!r}: see {wanted.page}/tree/main for "
            "its branches and commits"
        ) from error
    except errors.OfflineModeIsEnabled as error:
        raise HubFault("HF_HUB_OFFLINE forbids every download: unset it") from error
    except errors.HfHubHTTPError as error:
        raise HubFault(_refused(wanted, error)) from error
    except (_http_error(), errors.LocalEntryNotFoundError, errors.FileMetadataError) as error:
        raise HubFault(_unreachable(wanted, error)) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            text = f"the disk under {wanted.folder} is full: make room; finished files stay"
        else:
            text = f"cannot write {wanted.repo} to {wanted.folder}: {_one_line(error)}"
        raise HubFault(f"{text}: then try again") from error


def _http_error() -> type[Exception]:
    """Return the base of what the client's HTTP library raises, whichever one it is built on."""
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    base: type[Exception] = HTTPError
    return base


def _no_access(wanted: Wanted, error: Exception) -> str:
    from huggingface_hub import errors

    where = _token_source()
    if _is_bad_token(error):
        return _bad_token(where)
    if isinstance(error, errors.GatedRepoError):
        told = f"{wanted.repo} is gated: ask for access at {wanted.page}"
        if where is None:
            return f"{told}, then log in with: hf auth login (or set HF_TOKEN_PATH)"
        return (
            f"{told}; the token of {where} has none yet, or is not allowed to read gated "
            "repositories (hf auth whoami shows whose it is)"
        )
    hint = nearest(wanted.repo, _similar(wanted))
    told = f"the hub has no {wanted.kind} {wanted.repo!r}{hint}"
    login = "log in with: hf auth login" if where is None else f"see whose token {where} holds"
    return f"{told}: mend hub.{wanted.kind} in the recipe; where it is private, {login}"


def _similar(wanted: Wanted) -> list[str]:
    """Return repositories of a like name; [] where the hub does not say."""
    from huggingface_hub import HfApi

    look = HfApi().list_datasets if wanted.kind == "dataset" else HfApi().list_models
    words = re.split(r"[-_.]", wanted.repo.rpartition("/")[2])
    try:
        return [found.id for found in look(search=words[0], limit=50)]
    except Exception:  # a hint is not worth a fault of its own
        return []


def _refused(wanted: Wanted, error: Any) -> str:
    if _is_bad_token(error):
        return _bad_token(_token_source())
    status = error.response.status_code
    if status == 403:
        return (
            f"the hub forbids {wanted.repo}: ask for access at {wanted.page}, and use a token that "
            "may read it: hf auth login"
        )
    return f"the hub answered {status} for {wanted.repo}: try again later ({_one_line(error)})"


def _is_bad_token(error: Any) -> bool:
    message = error.response.headers.get("X-Error-Message", "")
    return error.response.status_code == 401 and "nvalid" in message and bool(_token_source())


def _bad_token(where: str | None) -> str:
    return (
        f"the hub does not accept the token of {where}: make one that may read at "
        "https://huggingface.co/settings/tokens, then log in with: hf auth login"
    )


def _unreachable(wanted: Wanted, error: Exception) -> str:
    from huggingface_hub import constants

    cause = error.__cause__ or error
    return (
        f"{wanted.repo}: no answer from {constants.ENDPOINT} ({_one_line(cause)}): run this where "
        "there is internet, or set HTTPS_PROXY; finished files stay"
    )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


# The token ----------------------------------------------------------------------------------


def _token_source() -> str | None:
    """Return where the token comes from, never the token; None where there is none."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if os.environ.get(name, "").strip():
            return name
    file = token_file()
    try:
        return str(file) if file.read_text(encoding="utf-8").strip() else None
    except OSError:
        return None


def token_file() -> Path:
    """Return the file in which the hub's client looks for a token, as its documentation says."""
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"
    )
    return Path(os.environ.get("HF_TOKEN_PATH") or os.path.join(home, "token")).expanduser()


def token_finding() -> Finding:
    """Ask the hub whose token this is; skipped where there is none or the hub does not answer."""
    check, where = "hub token", _token_source()
    if where is None:
        remedy = "for gated models: hf auth login, or name a file with it in HF_TOKEN_PATH"
        return skipped(check, "there is none, which public models do without", remedy)
    from huggingface_hub import HfApi, errors

    try:
        who = HfApi().whoami()
    except errors.HfHubHTTPError as error:
        if error.response.status_code == 401:
            text, _, remedy = _bad_token(where).partition(": ")
            return failed(check, text, remedy)
        return skipped(check, f"the hub answered {error.response.status_code}")
    except (_http_error(), OSError) as error:
        return skipped(check, f"the token of {where} was not tried: {_one_line(error)}")
    return ok(check, f"the token of {where} is {who.get('name', 'somebody')}'s")
