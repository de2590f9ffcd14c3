"""What tracking says of a run: its steps, its figures, its evaluations, its tags and its data."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher.look.outcome import outcome
from launcher.look.text import is_number
from launcher.run.directory import Run
from launcher.run.states import State
from plugins.evaluate.launcher import evaluation
from runspec import files

_ARTEFACTS = (files.RECIPE, files.JOB_SCRIPT, files.PROVENANCE, files.ATTEMPTS)
# Fields of a logged step that are no measurement.
_NOT_METRICS = ("step", "time", "epoch_step", "attempt")


def artefacts(run: Run) -> list[Path]:
    """Return the files of a run that tracking keeps, and its evaluations in their folder."""
    kept = [path for name in _ARTEFACTS if (path := run.path / name).is_file()]
    return [*kept, *_evaluation_files(run)]


def _evaluation_files(run: Run) -> list[Path]:
    return sorted((run.path / files.EVALS).glob("*.json"))


def fingerprint(run: Run, state: State) -> str:
    """Return what changes whenever there is something new to import."""
    seen = [state.word]
    for path in [run.path / files.METRICS, run.path / files.STATUS, *_evaluation_files(run)]:
        try:
            status = path.stat()
        except OSError:
            continue
        seen.append(f"{path.name} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(seen).encode()).hexdigest()[:16]


def steps(run: Run) -> Iterator[tuple[int, float, dict[str, float]]]:
    """Yield the logged steps: number, seconds since 1970, and what was measured."""
    for line in run.metrics:
        step, when = line.get("step"), line.get("time")
        if isinstance(step, int) and isinstance(when, int | float):
            measured = {name: value for name, value in line.items() if name not in _NOT_METRICS}
            yield step, when, {name: v for name, v in measured.items() if is_number(v)}


def outcomes(run: Run, state: State) -> dict[str, float]:
    """Return what came of the run as a whole."""
    values = outcome(run, state).items()
    left_out = ("step", "val_loss")
    return {
        f"outcome/{name}": float(value)
        for name, value in values
        if name not in left_out and is_number(value)
    }


def evaluations(run: Run) -> Iterator[tuple[str, float, float]]:
    """Yield name, value and time of each figure of the run's evaluations."""
    for result in evaluation.results_of(run):
        for name, value in evaluation.figures(result).items():
            yield f"eval/{name}", value, float(result.get("created") or 0)


def data_hash(run: Run) -> str | None:
    """Return one hash of the run's local data files, None if it names none."""
    listed = run.provenance.get("data")
    hashes = [str(each.get("sha256")) for each in listed or [] if isinstance(each, dict)]
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest() if hashes else None


def tags(run: Run, state: State) -> dict[str, Any]:
    """Return what a run is and where it comes from."""
    record, made, status = run.provenance, run.submission, run.status
    kit, model = record.get("kit") or {}, record.get("model") or {}
    values = {
        "cookbook.state": state.word,
        "cookbook.path": run.path,
        "recipe": made.get("recipe"),
        "site": made.get("site"),
        "job_ids": ", ".join(str(job.get("job_id")) for job in run.all_jobs),
        "nodes": ", ".join(map(str, status.get("nodes") or [])),
        "cause": status.get("cause"),
        "config_sha256": record.get("config_sha256"),
        "data_sha256": data_hash(run),
        "model_folder": model.get("folder"),
        "model_revision": model.get("revision"),
        "mlflow.source.name": " ".join(map(str, record.get("command") or [])),
        "mlflow.source.git.commit": kit.get("commit"),
        "uncommitted_changes": bool(kit.get("diff")),
        "export": run.path / files.EXPORT if (run.path / files.EXPORT).is_dir() else None,
    }
    return {key: value for key, value in values.items() if value not in (None, "")}
