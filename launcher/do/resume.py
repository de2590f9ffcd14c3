"""Starting a run again from its last complete checkpoint, as it was or with changes."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jinja2

from launcher import paths
from launcher import site as sites
from launcher.check import preflight
from launcher.do.submit import PlannedRun, context, plan, refuse, start
from launcher.errors import (
    CookbookError,
    RecipeFault,
    RunFault,
    SlurmTimeout,
    UsageFault,
)
from launcher.look.outcome import leaves
from launcher.recipe import load as recipes
from launcher.recipe import override
from launcher.recipe.model import Recipe
from launcher.run import built, code, provenance, trust
from launcher.run.directory import Run, locked
from launcher.run.states import State, living, state_of
from launcher.site import Site
from launcher.slurm import executors
from launcher.slurm.job import Executor
from runspec import files
from runspec.keys.key import may_change
from runspec.layout import Layout, LayoutError

# They may change together, as long as a step sees the same samples.
_BATCH = ("batch_size", "gradient_accumulation_steps")
# Lines of a job script that follow the environment of the command that rendered it.
_OF_THE_SHELL = (
    "export VENV=",
    "export COOKBOOK_ROOT=",
    "export COOKBOOK_COMPONENTS=",
)


@dataclass(frozen=True)
class Changes:
    """What a resumed run does in another way: overrides of its recipe, and options of Slurm.

    skip: leave out the checks that may be left out. code: use the present code of the kit, not the
    run's.
    """

    site: Site
    overrides: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    skip: bool = False
    code: bool = False

    @property
    def words(self) -> list[str]:
        """The changes as they are typed."""
        options = (f"--{key.replace('_', '-')}={value}" for key, value in self.options.items())
        return [*options, *self.overrides, *["--code=current"] * self.code]


def resume(
    run: Run,
    executor: Executor | None = None,
    changes: Changes | None = None,
    say: Callable[[str], None] = lambda line: None,
    after: str = "",
) -> bool:
    """Start a new job of a run; UsageFault if it is finished or a job of it is still there.

    False if none was needed: the run had finished after somebody ended its job.

    The job runs where the last one ran, or by the given executor. Its script follows the site's
    file. Changes are checked as submit checks a new run; if they, or the job, are refused, the run
    stays as it was. after: the id of a job that has to end before it begins.
    """
    with locked(run) as lease:
        if faults := run.broken():
            raise RunFault([f"{fault}; then: cookbook resume {run.name}" for fault in faults])
        _refuse_others(run, changes)
        _refuse_unless_ended(run, state_of(run))
        if run.progress.get("state") == "finished":
            # Its job was cancelled or lost while it exported, and finished all the same.
            done = {
                "state": "COMPLETED",
                "cause": "finished",
                "message": "",
                "updated": time.time(),
            }
            run.write(files.STATUS, {**run.status, **done})
            say(f"{run.name} had finished: it is COMPLETED, and no job was started")
            return False
        executor = executor or executors.executor_of(run.job_id)
        if not (changes and changes.code):
            _tell_of_code(run, say)
        if changes is None:
            with script_of_today(run, executor, say) as submission:
                built.restore(run, say)
                start(run, executor, lease, submission, after)
            return True
        if command := run.submission.get("command"):
            raise UsageFault(
                f"{run.name} was made by {command} and can only resume unchanged: leave "
                f"{changes.words[0]} out, or type it with {command}"
            )
        used = code.of_run(run.path)
        kit = code.present(changes.site.root) if changes.code or used is None else used
        if kit != used:
            say(f"code: {kit.title}, was {used.title if used else 'that of the checkout'}")
        planned, changes = _planned(run, changes, executor, say, kit.folder / "templates")
        refuse(preflight.faults(context(planned), changes.skip))
        built.ensure(planned.recipe.environment, changes.site.root, say)
        with _rewritten(run, planned.contents, planned.asked, kit):
            start(run, executor, lease, changes.words, after)
        return True


@contextmanager
def script_of_today(
    run: Run, executor: Executor, say: Callable[[str], None]
) -> Iterator[list[str]]:
    """Render the job script from the site's file as it is now; yield what changed, for the record.

    A script that was edited by hand stays as it is, and so does one that cannot be rendered now. If
    no job comes of it, the script is restored.
    """
    name = run.submission.get("site")
    planned = None
    # The job of a plug-in's command is rendered from a recipe of its own.
    if name and not run.submission.get("command"):
        try:
            planned = _rendered(run, str(name), executor)
        except (CookbookError, jinja2.TemplateError, OSError) as error:
            say(f"note: job.sbatch stays as it is, because it cannot be rendered now: {error}")
    if planned is None or not _replaces_script(run, planned, say):
        yield []
        return
    origin = f"configs/clusters/{name}.yaml"
    say(f"job.sbatch: rendered again from {origin}, which has changed since")
    contents = {files.JOB_SCRIPT: planned.script}
    built.ensure(planned.recipe.environment, planned.cluster.root, say)
    with _rewritten(run, contents, planned.asked, code.of_run(run.path)):
        yield [f"job.sbatch rendered again from {origin}"]


def _rendered(run: Run, site_name: str, executor: Executor) -> PlannedRun:
    changes = Changes(sites.load(site_name))
    kit = code.of_run(run.path)
    templates = paths.TEMPLATES if kit is None else kit.folder / "templates"
    return _planned(run, changes, executor, lambda line: None, templates)[0]


def _replaces_script(run: Run, planned: PlannedRun, say: Callable[[str], None]) -> bool:
    """Return whether the rendered script differs by what the site's file says, and say so if not.

    What the shell of this command sets belongs to that shell, not to the site.
    """
    old = (run.path / files.JOB_SCRIPT).read_text(encoding="utf-8")
    if old == planned.script:
        return False
    known = run.submission.get("script_sha256") or run.provenance.get("script_sha256")
    if provenance.text_sha256(old) != known:
        say("note: job.sbatch was edited by hand and stays as it is")
        return False
    shell = [
        sorted(line for line in text.splitlines() if line.startswith(_OF_THE_SHELL))
        for text in (old, planned.script)
    ]
    if shell[0] != shell[1]:
        differs = next(iter(set(shell[0]) ^ set(shell[1]))).removeprefix("export ")
        say(f"note: job.sbatch stays as it is, because this shell has another {differs}")
        return False
    return True


def _tell_of_code(run: Run, say: Callable[[str], None]) -> None:
    """Say that the run keeps its code if the present one differs; RunFault if its copy is gone."""
    used, other = code.of_run(run.path), f"cookbook resume {run.name} --code current"
    if used is None and (run.path / files.KIT).is_symlink():
        raise RunFault(
            f"{run.name}: the copy of the kit's code that it used was removed "
            f"({os.readlink(run.path / files.KIT)}): continue with the current code: {other}"
        )
    if used is not None and used.sha256 != code.present_sha256():
        say(
            f"note: {run.name} continues with its own code, {used.title}; for the current code: "
            f"{other}"
        )


def _refuse_others(run: Run, changes: Changes | None) -> None:
    """RunFault if a job would execute what another user could have written.

    Checkpoints hold pickles, and the job script and the code are executed.
    """
    site, name = changes.site if changes else None, str(run.submission.get("site") or "default")
    with suppress(CookbookError):  # the run may be older than the site's file
        site = site or sites.load(name)
    trusted = site.trusted_users if site else ()
    if text := trust.fault(run.path, trusted):
        raise RunFault(
            f"{text}: its job would execute what others have written there; if you trust that, "
            f"{trust.remedy(run.path, name, trusted)}, or submit your own run from its model"
        )
    used = code.of_run(run.path)
    if used is not None and not (changes and changes.code):
        code.require(used, trusted)


def _refuse_unless_ended(run: Run, state: State) -> None:
    if state.word == "COMPLETED":
        export = run.path / files.EXPORT
        where = f": its model is in {export}" if export.exists() else ", nothing is left to do"
        raise UsageFault(f"{run.name} is finished{where}")
    if state.elsewhere:
        raise UsageFault(
            f"{run.name} is {state.word} ({executors.title(state.job_id)}): {state.detail}, and "
            f"check with: cookbook status {run.name}"
        )
    job_id, word, detail = state.job_id, state.word, state.detail
    if state.ended:
        # Its last word may be older than a job that waits: submitted by hand, or nobody knows of it
        # because the command that made it was killed.
        jobs = [(job_id, word) for job_id, word in living(run).items() if word != "COMPLETING"]
        if not jobs:
            return
        (job_id, word), detail = jobs[-1], ""
    detail = f", {detail}" if detail else ""
    raise UsageFault(
        f"{run.name} is {word} ({executors.title(job_id)}{detail}): follow it with: cookbook watch "
        f"{run.name}, or end it with: cookbook cancel {run.name}"
    )


def _planned(
    run: Run,
    changes: Changes,
    executor: Executor,
    say: Callable[[str], None],
    templates: Path,
) -> tuple[PlannedRun, Changes]:
    """Return the run with its changes, and the changes with what follows from them.

    UsageFault for changes with which it would not go on as the same run.
    """
    before, after = (
        _recipe(run, each, executor)
        for each in (replace(changes, overrides=(), options={}), changes)
    )
    if before.entry.method and files.checkpoint_steps(run.path):
        wanted, now = _samples_per_step(before, changes), _samples_per_step(after, changes)
        given = {override.key_of(text) for text in changes.overrides}
        if wanted != now and given.isdisjoint(_BATCH):
            micro_steps = int(after.config.get(_BATCH[1]) or 1)
            steps, rest = divmod(wanted, now // micro_steps)
            if not rest:
                same = f"{_BATCH[1]}={steps}"
                say(f"note: {same}, so that a step uses {wanted} samples as before")
                changes = replace(changes, overrides=(*changes.overrides, same))
                after, now = _recipe(run, changes, executor), wanted
        faults = list(_identity_faults(run, before, after, changes))
        if wanted != now:
            faults.append(
                f"a step would use {now} samples, but the run's checkpoints were made with "
                f"{wanted}: change batch_size, gradient_accumulation_steps or --nodes"
            )
        if faults:
            raise UsageFault(faults)
    # <utc>-<label>-<4 hex>
    label = run.name[16:-5]
    planned = plan(after, changes.site, executor, label, run.path, run.sweep or "", templates)
    return planned, changes


def _recipe(run: Run, changes: Changes, executor: Executor) -> Recipe:
    """Return the run's own recipe with changes, under the name of the one it was made of."""
    file, made = run.path / files.RECIPE, run.submission
    recipe = recipes.load(str(file), changes.overrides, changes.options)
    name, origin = str(made.get("recipe") or recipe.name), made.get("recipe_file")
    # Only what is not the kit's own trainer has paths that count from there.
    foreign = recipe.entry.own_code or recipe.entry.engine
    place = Path(str(origin)) if foreign and origin else file
    return sites.complete(replace(recipe, name=name, path=place), changes.site, executor)


def _samples_per_step(recipe: Recipe, changes: Changes) -> int:
    config = recipe.resolved(changes.site.root, "run")
    try:
        groups = Layout.of(config, recipe.resources.world_size).data_parallel
    except LayoutError as error:
        raise RecipeFault(error.faults) from error
    batch, micro_steps = (int(config.get(key) or 1) for key in _BATCH)
    return batch * micro_steps * groups


def _identity_faults(run: Run, before: Recipe, after: Recipe, changes: Changes) -> Iterator[str]:
    """Yield the keys that differ and may not, once there are checkpoints."""
    root, path = changes.site.root, str(run.path)
    old, new = (dict(leaves(recipe.resolved(root, path))) for recipe in (before, after))
    for key in {**old, **new}:
        if old.get(key) == new.get(key) or key in _BATCH or may_change(after.entry.keys, key):
            continue
        yield (
            f"{key} may not change at resume, from {old.get(key)!r} to {new.get(key)!r}: leave it "
            f"out, or make a new run with: cookbook submit {run.path / files.RECIPE} "
            f"{key}={new.get(key)}"
        )


@contextmanager
def _rewritten(
    run: Run, changed: Mapping[str, str], asked: Mapping[str, Any], kit: code.Code | None
) -> Iterator[None]:
    """Replace files of the run and its code; if no job comes of it, restore them."""
    mode, used = run.path.stat().st_mode & 0o666, code.of_run(run.path)
    hashed = provenance.text_sha256(changed[files.JOB_SCRIPT])
    made = {**run.submission, "asked": asked, "script_sha256": hashed}
    contents = {**changed, files.SUBMISSION: files.json_text(made)}
    before = {name: (run.path / name).read_text(encoding="utf-8") for name in contents}
    for name, text in contents.items():
        files.write_text(run.path / name, text, mode)
    if kit is not None:
        code.link(run.path, kit)
    try:
        yield
    except (KeyboardInterrupt, SlurmTimeout):
        raise  # there may be a job
    except BaseException:
        for name, text in before.items():
            files.write_text(run.path / name, text, mode)
        if used is not None:
            code.link(run.path, used)
        raise
