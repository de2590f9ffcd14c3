"""A repository of the hub that a recipe names: its files, where they go, and which are there."""

import glob
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.tqdm import disable_progress_bars

from launcher.errors import HubFault, nearest

# Pickles can run code when they are opened.
_PICKLES = (".bin", ".pth", ".pt", ".pkl", ".pickle", ".ckpt", ".joblib")
# The same weights for other frameworks.
_OTHER_WEIGHTS = (".h5", ".msgpack", ".onnx", ".onnx_data", ".gguf", ".tflite", ".ot")
_FILES_AT_ONCE = 8
# Tells the user how a download goes on.
Say = Callable[[str], None]


@dataclass
class Repository:
    """A repository at a branch, tag or commit.

    kind is model or dataset; folder is where the files go; needs are the files that the recipe
    reads, by name. The rest is known after ask(): the commit, the files to fetch by name, the
    names that are left out, and the names of the files that are not there yet. key is where the
    recipe names it, in its block hub, if that is not its kind.
    """

    kind: str
    name: str
    revision: str
    folder: Path
    needs: tuple[str, ...] = ()
    commit: str = ""
    files: dict[str, RepoFile] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    missing: set[str] = field(default_factory=set)
    key: str = ""

    @property
    def page(self) -> str:
        return f"{constants.ENDPOINT}/{'datasets/' if self.kind == 'dataset' else ''}{self.name}"

    @property
    def place(self) -> Path:
        """The folder that holds the files under the names of the repository."""
        return self.folder / "snapshots" / self.commit if self.kind == "dataset" else self.folder

    @property
    def summary(self) -> str:
        gib, count = sum(file.size for file in self.files.values()) / 2**30, len(self.files)
        text = f"{self.name} at {self.commit[:12]}: {count} files, {gib:.2f} GiB"
        there = f"{count - len(self.missing)} of them already there"
        return f"{text}, {there}; into {self.folder}"

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
        self.files = {k: file for k, file in whole.items() if self._is_chosen(k)}
        self.left_out = [name for name in whole if name not in self.files]
        self.missing = set(self.files)
        self._refuse(whole)

    def snapshot(self, revision: str, dry_run: bool = False) -> Any:
        """Hand the files to the hub's client: it keeps what is there and resumes what is cut."""
        if not sys.stderr.isatty():
            disable_progress_bars()
        dataset = self.kind == "dataset"
        return snapshot_download(
            self.name,
            repo_type=self.kind,
            revision=revision,
            local_dir=None if dataset else self.folder,
            cache_dir=self.folder.parent if dataset else None,
            # Not allow_patterns: the client compares every file with every pattern.
            ignore_patterns=[glob.escape(name) for name in self.left_out],
            max_workers=_FILES_AT_ONCE,
            dry_run=dry_run,
        )

    def _is_chosen(self, name: str) -> bool:
        if name.endswith(_PICKLES):
            return False
        other = self.kind == "model" and name.endswith(_OTHER_WEIGHTS)
        return not other or name in self.needs

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
