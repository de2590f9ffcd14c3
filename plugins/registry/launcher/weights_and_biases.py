"""From run directories to Weights & Biases: settings, metrics, figures, files and lineage.

Nodes write files only, as for MLflow. Without a network (WANDB_MODE=offline) W&B writes files that
`wandb sync` uploads from elsewhere.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launcher.errors import StoreFault
from launcher.look.outcome import configuration
from launcher.run.directory import Run
from launcher.run.states import State
from plugins.registry.launcher import facts
from plugins.registry.launcher.store import Store, locked
from runspec import files

_INSTALL = "bash setup.sh --with wandb"
# What has been written of each run: W&B takes no step twice.
_WRITTEN = "wandb.json"


def offline(store: Store) -> Path | None:
    """Return the folder of what `wandb sync` has to upload, None if W&B is reached directly."""
    return store.folder / "wandb" if os.environ.get("WANDB_MODE") == "offline" else None


def import_runs(store: Store, runs: Iterable[Run]) -> Iterator[tuple[str, str]]:
    """Write runs to W&B; yield each run's name and what was done or why not.

    Where the setting names no project, each recipe has one.

    Raises:
        StoreFault: W&B is not installed, nobody is logged in, or it does not answer.
    """
    entity, _, project = store.wandb.partition(":")[2].rpartition("/")
    with locked(store.folder), _faults_in_one_line():
        wandb = _module()
        written = files.read_object(store.folder / _WRITTEN) or {}

        def write(run: Run, state: State) -> str:
            before = written.get(run.name)
            mark = facts.fingerprint(run, state)
            if before and before["mark"] == mark:
                return "is up to date"
            last = before["step"] if before else -1
            name = project or str(run.submission.get("recipe") or "unknown")
            opened = wandb.init(
                entity=entity or None,
                project=name,
                id=run.name,
                name=run.name,
                resume="allow",
                dir=str(store.folder),
                settings=_settings(wandb),
            )
            try:
                newest, count = _write(opened, run, state, last)
            finally:
                opened.finish(exit_code=int(state.word == "FAILED"))
            written[run.name] = {"mark": mark, "step": newest}
            files.write_json(store.folder / _WRITTEN, written)
            return f"{'updated' if before else 'imported'}: {count:,} values"

        yield from facts.import_each(runs, write)


def _module() -> Any:
    os.environ.setdefault("WANDB_SILENT", "true")
    try:
        # Imported late: it takes seconds.
        import wandb
    except ImportError as error:
        raise StoreFault(f"W&B is not installed ({error.name}): {_INSTALL}") from error
    return wandb


def _settings(wandb: Any) -> Any:
    # This host is not the one that trained: nothing of it is recorded.
    return wandb.Settings(
        silent=True,
        console="off",
        disable_code=True,
        disable_git=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_save_requirements=False,
    )


@contextmanager
def _faults_in_one_line() -> Iterator[None]:
    """Turn what W&B raises into one line."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith("wandb."):
            raise
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        no_key = "API key" in first or "wandb login" in first
        message = (
            "nobody is logged in: run: wandb login" if no_key else f"{first}: check the network"
        )
        raise StoreFault(
            f"W&B: {message}; or set WANDB_MODE=offline, and upload later with: wandb sync"
        ) from error


def _write(opened: Any, run: Run, state: State, last: int) -> tuple[int, int]:
    """Write what is new; return the newest step, and the number of values."""
    facts_of_it = {f"cookbook/{key}": str(value) for key, value in facts.tags(run, state).items()}
    data = run.provenance.get("data")
    lineage = {"cookbook/data": data} if isinstance(data, list) and data else {}
    settings = {**configuration(run), **facts_of_it, **lineage}
    opened.config.update(settings, allow_val_change=True)
    count = 0
    for step, when, measured in sorted(facts.steps(run), key=lambda each: each[0]):
        if step > last:
            opened.log({**measured, "_timestamp": when}, step=step)
            last, count = step, count + len(measured)
    figures = facts.outcomes(run, state)
    figures |= {name: value for name, value, _ in facts.evaluations(run)}
    opened.summary.update(figures)
    for path in facts.artefacts(run):
        opened.save(str(path), base_path=str(run.path), policy="now")
    return last, count + len(figures)
