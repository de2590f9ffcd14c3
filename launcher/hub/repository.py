"""A repository of the hub that a recipe names: its files, where they go, and if they are whole.

huggingface_hub lists, fetches, resumes and verifies them.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.tqdm import disable_progress_bars

from launcher import paths
from launcher.errors import HubFault, nearest
from runspec.files import write_text

# Pickles can run code when they are opened.
_PICKLES = (".bin", ".pth", ".pt", ".pkl", ".pickle", ".ckpt", ".joblib")
# The same weights for other frameworks.
_OTHER_WEIGHTS = (".h5", ".msgpack", ".onnx", ".onnx_data", ".gguf", ".tflite", ".ot")
_FILES_AT_ONCE = 8
# Tells the user how a download goes on.
Say = Callable[[str], None]


@dataclass
class Repository:
    """A repository at a branch, tag or commit."""

    # model or dataset.
    kind: str
    name: str
    revision: str
    # Where the files go.
    folder: Path
    # The files that the recipe reads.
    needs: tuple[str, ...] = ()
    # Where the recipe names it, in its block hub, if that is not its kind.
    key: str = ""
    # Known after ask(): the commit, and the files to fetch by name.
    commit: str = ""
    files: dict[str, RepoFile] = field(default_factory=dict)

    @property
    def page(self) -> str:
        return f"{constants.ENDPOINT}/{'datasets/' if self.kind == 'dataset' else ''}{self.name}"

    @property
    def place(self) -> Path:
        """The folder that holds the files under the names of the repository."""
        return self.folder / "snapshots" / self.commit if self.kind == "dataset" else self.folder

    @property
    def missing(self) -> list[RepoFile]:
        """The files that are not there in their whole length."""
        there = {name: self.place / name for name in self.files}
        return [
            file
            for name, file in self.files.items()
            if not there[name].is_file() or there[name].stat().st_size != file.size
        ]

    @property
    def summary(self) -> str:
        gib, count = sum(file.size for file in self.files.values()) / 2**30, len(self.files)
        text = f"{self.name} at {self.commit[:12]}: {count} files, {gib:.2f} GiB"
        return f"{text}, {count - len(self.missing)} of them already there; into {self.folder}"

    @property
    def _left_out(self) -> tuple[str, ...]:
        return _PICKLES + (_OTHER_WEIGHTS if self.kind == "model" else ())

    def ask(self) -> None:
        """Ask the hub for the commit and its files, and if this user may read them.

        Raises:
            HubFault: a file that the recipe reads is missing; and the client's own errors.
        """
        api, kind = HfApi(), self.kind
        self.commit = str(api.repo_info(self.name, repo_type=kind, revision=self.revision).sha)
        # A gated repository shows its index to everybody and its files to some.
        api.auth_check(self.name, repo_type=kind)
        tree = api.list_repo_tree(self.name, repo_type=kind, revision=self.commit, recursive=True)
        whole = {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}
        self.files = {k: file for k, file in whole.items() if not k.endswith(self._left_out)}
        self._refuse(whole)

    def _refuse(self, whole: dict[str, RepoFile]) -> None:
        """Refuse names that lead out of the folder, and a repository without the files needed."""
        for name in self.files:
            if name.startswith("/") or ".." in name.split("/"):
                raise HubFault(f"{self.name} names the file {name!r}: do not use that repository")
        why = "pickles, which can run code when opened: choose a revision with safetensors, or "
        why += "download them with: hf download"
        lacking = [name for name in self.needs if name not in self.files]
        pickles = [name for name in lacking if name in whole]
        if lacking and not pickles:
            why = f"not in the repository{nearest(lacking[0], whole)}: fix the recipe, or choose "
            why += "another revision"
        if named := pickles or lacking:
            message = f"{len(named)} of the files that the recipe reads from {self.name}, first"
            raise HubFault(f"{message} {named[0]}, are {why}")
        if not self.files:
            why = f"has only {why}" if whole else "has no files: choose another revision"
            raise HubFault(f"{self.name} {why}")

    def fetch(self, say: Say) -> Path:
        """Fetch what is missing, verify every file, and return the record of it.

        The client keeps what is there and resumes what is cut.
        """
        if not sys.stderr.isatty():
            disable_progress_bars()
        is_dataset = self.kind == "dataset"
        snapshot_download(
            self.name,
            repo_type=self.kind,
            # A dataset's cache notes which commit its branch led to; jobs look there when offline.
            revision=self.revision if is_dataset else self.commit,
            local_dir=None if is_dataset else self.folder,
            cache_dir=self.folder.parent if is_dataset else None,
            ignore_patterns=[f"*{suffix}" for suffix in self._left_out],
            max_workers=_FILES_AT_ONCE,
        )
        if broken := self._broken():
            for path in (self.place / name for name in broken):
                path.resolve().unlink(missing_ok=True)
                path.unlink(missing_ok=True)
            raise HubFault(
                f"{len(broken)} of the files of {self.name}, first {broken[0]}, differ from the "
                "hub's index, and were removed: repeat the command; if they differ again, a proxy "
                "or the disk may be at fault"
            )
        record = self.folder / paths.DOWNLOAD_RECORD
        made_of = {"repo": self.name, "kind": self.kind, "revision": self.commit}
        write_text(record, json.dumps(made_of, indent=1) + "\n", mode=0o644)
        say(f"{self.name}: all {len(self.files)} files are whole; recorded in {record}")
        return record

    def _broken(self) -> list[str]:
        """Return the files that are missing or differ from the hub's checksums."""
        verified = HfApi().verify_repo_checksums(
            self.name, repo_type=self.kind, revision=self.commit, local_dir=self.place
        )
        wrong = {each["path"] for each in verified.mismatches}.union(verified.missing_paths)
        return [name for name in self.files if name in wrong]
