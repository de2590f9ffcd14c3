"""Submitting a run again from its provenance: its recipe, and the code that made it."""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import paths, yamlfile
from launcher.errors import RunFault, UsageFault
from launcher.executors import slurm
from launcher.recipes import entries
from launcher.runs import provenance
from launcher.runs.directory import Run
from launcher.runs.snapshot import git
from launcher.site import Site
from launcher.venv import packages
from runspec import files

# The folder of replayed code and recipes, in the shared folder.
_FOLDER = "replays"


@dataclass(frozen=True)
class Replay:
    """A run that is ready to be submitted again, by the launcher of the code that made it."""

    checkout: Path
    recipe: Path
    label: str
    site: Site

    def command(self, dry_run: bool, local: bool) -> list[str]:
        """Return what submits it, to be run in the checkout."""
        argv = [sys.executable, "-m", "launcher", "submit", str(self.recipe), "--name", self.label]
        argv += ["--cluster", self.site.name] if self.site.name != "default" else []
        return argv + ["--dry-run"] * dry_run + ["--local"] * local

    def environment(self) -> dict[str, str]:
        """Return the variables of that command."""
        own = {"COOKBOOK_ROOT": str(self.site.root), "COOKBOOK_VENV": str(paths.venv_root())}
        return {**os.environ, **own, "PYTHONPATH": str(self.checkout)}


def prepare(run: Run, site: Site, say: Callable[[str], None]) -> Replay:
    """Make the code and the recipe of a run ready to be submitted, and say what is not the same.

    Raises:
        UsageFault: the run cannot be replayed.
        RunFault: its code cannot be made again.
    """
    record, submission = run.provenance, run.submission
    recipe = run.path / files.RECIPE
    if not record or not recipe.is_file():
        words = f"{run.name} has no {files.PROVENANCE} and {files.RECIPE}"
        raise UsageFault(f"{words}, so nobody knows what made it: submit a recipe of your own")
    config = yamlfile.load(recipe)
    if entries.find(str(config.get("entry") or "sft")).own_code:
        code = run.path / files.CODE
        words = f"{run.name} ran a script of its own, which replay does not start"
        raise UsageFault(f"{words}: its code is in {code}; submit it from there")
    kit = record.get("kit")
    checkout = _checkout(kit if isinstance(kit, dict) else {}, site, say)
    name = str(submission.get("recipe") or "recipe")
    copy = site.root / _FOLDER / run.name / f"{name}.yaml"
    copy.parent.mkdir(parents=True, exist_ok=True)
    # The new run has a directory of its own.
    config.pop("output_dir", None)
    files.write_text(copy, yamlfile.dump(config))
    for line in _not_the_same(run, record, config, site):
        say(f"not the same: {line}")
    return Replay(checkout, copy, run.name[16:-5], site)


def _checkout(kit: dict[str, Any], site: Site, say: Callable[[str], None]) -> Path:
    """Return a checkout of the code that made a run: this one if nothing differs, else a copy."""
    here = provenance.git_state(paths.REPO_ROOT)
    commit, diff = kit.get("commit"), str(kit.get("diff") or "")
    if commit is None or here["commit"] is None:
        say("not the same: the code, which was in no git checkout: the present code is used")
        return paths.REPO_ROOT
    if (here["commit"], here["diff"]) == (commit, diff):
        return paths.REPO_ROOT
    mark = hashlib.sha256(diff.encode()).hexdigest()[:8]
    folder = site.root / _FOLDER / f"code-{str(commit)[:12]}-{mark}"
    if not folder.is_dir():
        _make(folder, str(commit), diff)
    say(
        f"code: commit {str(commit)[:12]}{' and its uncommitted changes' * bool(diff)}, in {folder}"
    )
    return folder


def _make(folder: Path, commit: str, diff: str) -> None:
    """Make a checkout of a commit with changes, whole or not at all."""
    repository, temporary = paths.REPO_ROOT, folder.with_name(f".{folder.name}.{os.getpid()}")
    if git(repository, "cat-file", "-e", f"{commit}^{{commit}}") is None:
        raise RunFault(
            f"commit {commit} is not in {repository}: get it with: git -C {repository} fetch --all"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        _git(repository, "clone", "--quiet", "--shared", "--no-checkout", ".", str(temporary))
        _git(temporary, "checkout", "--quiet", "--detach", commit)
        if diff:
            words = "its uncommitted changes cannot be applied (a binary file?)"
            _git(temporary, "apply", "--whitespace=nowarn", "-", text=diff, words=words)
        for file in paths.CLUSTERS.glob("*.yaml"):
            # A site's settings are no part of the code, and git ignores them.
            copy = temporary / file.relative_to(paths.REPO_ROOT)
            if not copy.exists():
                copy.write_bytes(file.read_bytes())
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _git(folder: Path, *arguments: str, text: str | None = None, words: str = "") -> None:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], input=text, capture_output=True, text=True
    )
    if done.returncode:
        said = done.stderr.strip().replace("\n", " | ")
        raise RunFault(
            f"{words or 'git cannot make the code again'}: {said}: submit the recipe with the "
            "present code: cookbook submit RUN/recipe.yaml"
        )


def _not_the_same(
    run: Run, record: dict[str, Any], config: dict[str, Any], site: Site
) -> Iterator[str]:
    """Yield what the new run cannot have as the old one had it."""
    kit = record.get("kit")
    untracked = kit.get("untracked") if isinstance(kit, dict) else None
    if untracked:
        names = ", ".join(map(str, untracked[:5]))
        yield f"files that git did not track, whose content nobody recorded: {names}"
    given = record.get("packages")
    if isinstance(given, list):
        before = dict(str(each).partition("==")[::2] for each in given)
        now = packages()
        changed = [
            f"{name} {before.get(name, '(none)')} -> {now.get(name, '(none)')}"
            # Other versions first, then what was added and removed.
            for name in sorted(
                {*before, *now}, key=lambda each: (each not in before or each not in now, each)
            )
            if before.get(name) != now.get(name)
        ]
        if changed:
            more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
            yield f"packages: {', '.join(changed[:5])}{more}"
    system = {"python": sys.version.split()[0], "slurm": slurm.version()}
    for name, version in system.items():
        if record.get(name) != version:
            yield f"{name} {record.get(name)} -> {version}"
    recorded = {each["file"]: each for each in provenance.data_files(config)}
    listed = record.get("data")
    for each in listed if isinstance(listed, list) else []:
        file = each.get("file") if isinstance(each, dict) else None
        if file and recorded.get(file) != each:
            yield f"the data in {file}, which has been changed or removed since"
    if not isinstance(listed, list):
        yield "perhaps the data: the run is of a version that recorded no hash of it"
    changes = [job["changes"] for job in run.all_jobs if job.get("changes")]
    if changes:
        words = "; ".join(" ".join(map(str, each)) for each in changes)
        yield f"the first part of the run: its recipe was changed at resume ({words})"
    yield "nodes, the order of sums between ranks on GPUs, and checkpoints: it begins at step 0"
