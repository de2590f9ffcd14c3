"""From run directories to MLflow: parameters, metrics, tags, artefacts and lineage.

Nodes write files only. This importer reads them and is the one that writes the store; it can be
repeated at any time, and writes what is new.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.errors import CookbookError
from launcher.observe.outcome import configuration, outcome
from launcher.runs.directory import Run
from launcher.runs.states import State, judged
from launcher.tracking.store import Store
from runspec import files

# MLflow's limits of one call, and of a value.
_METRICS, _PARAMS, _TEXT = 1000, 100, 5000
_ARTEFACTS = (files.RECIPE, files.JOB_SCRIPT, files.PROVENANCE, files.ATTEMPTS, files.SAMPLES)
_ENDS = {"COMPLETED": "FINISHED", "CANCELLED": "KILLED", "FAILED": "FAILED"}
# Fields of a logged step that are no measurement.
_NOT_METRICS = ("step", "time", "epoch_step", "attempt")
RUN_TAG = "cookbook.run"


def import_runs(client: Any, store: Store, runs: Iterable[Run]) -> Iterator[tuple[str, str]]:
    """Write runs into the store; yield each run's name and what was done or why not.

    One run that cannot be read keeps no other from being imported.
    """
    for run, state in judged(runs):
        if run.torn or not run.submission:
            yield run.name, "passed over: it is no whole run directory"
            continue
        try:
            done = _import(client, store, run, state)
        except (CookbookError, OSError, ValueError, KeyError, TypeError) as error:
            done = f"passed over: {str(error).splitlines()[0] if str(error) else type(error)}"
        yield run.name, done


def find(client: Any, run_name: str) -> Any:
    """Return MLflow's run of a run directory, None if it is not imported."""
    experiments = [each.experiment_id for each in client.search_experiments()]
    wanted = f"tags.`{RUN_TAG}` = '{run_name}'"
    found = client.search_runs(experiments, wanted, max_results=1) if experiments else []
    return found[0] if found else None


def _import(client: Any, store: Store, run: Run, state: State) -> str:
    tracked = find(client, run.name)
    mark = _fingerprint(run, state)
    if tracked is not None and tracked.data.tags.get("cookbook.imported") == mark:
        return "is up to date"
    made = run.submission
    created = run.provenance.get("created")
    first = int(1000 * created) if isinstance(created, int | float) else None
    new = tracked is None
    if tracked is None:
        experiment = _experiment(client, store, str(made.get("recipe") or "unknown"))
        tags = {RUN_TAG: run.name, "mlflow.runName": run.name}
        tracked = client.create_run(experiment, start_time=first, tags=tags)
    run_id = tracked.info.run_id
    changed = _parameters(client, run_id, configuration(run), tracked.data.params)
    metrics = [*_steps(run), *_figures(run, state), *_evaluations(run)]
    for begin in range(0, len(metrics), _METRICS):
        client.log_batch(run_id, metrics=metrics[begin : begin + _METRICS])
    for name in _ARTEFACTS:
        if (run.path / name).is_file():
            client.log_artifact(run_id, str(run.path / name))
    for path in sorted((run.path / files.EVALS).glob("*.json")):
        client.log_artifact(run_id, str(path), files.EVALS)
    if new:
        _lineage(client, run_id, run)
    for key, value in {**_tags(run, state), **changed, "cookbook.imported": mark}.items():
        client.set_tag(run_id, key, str(value)[:_TEXT])
    if state.ended:
        ended = run.status.get("ended") or run.status.get("updated")
        at = int(1000 * ended) if isinstance(ended, int | float) else None
        client.set_terminated(run_id, _ENDS.get(state.word, "FAILED"), at)
    else:
        client.update_run(run_id, "SCHEDULED" if state.word == "PENDING" else "RUNNING")
    return f"{'imported' if new else 'updated'}: {len(metrics):,} values"


def _fingerprint(run: Run, state: State) -> str:
    """Return what changes whenever there is something new to import."""
    seen = [state.word]
    evals = sorted((run.path / files.EVALS).glob("*.json"))
    for path in [run.path / files.METRICS, run.path / files.STATUS, *evals]:
        try:
            facts = path.stat()
        except OSError:
            continue
        seen.append(f"{path.name} {facts.st_size} {facts.st_mtime_ns}")
    return hashlib.sha256("\n".join(seen).encode()).hexdigest()[:16]


def _experiment(client: Any, store: Store, name: str) -> str:
    found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    # MLflow's default lies in whatever folder the command was typed in.
    place = (store.artifacts / name).as_uri() if store.embedded else None
    return str(client.create_experiment(name, artifact_location=place))


def _parameters(
    client: Any, run_id: str, settings: Mapping[str, Any], before: Mapping[str, str]
) -> dict[str, str]:
    """Log the settings; return as tags those that a resume changed: MLflow keeps the first."""
    from mlflow.entities import Param

    texts = {key: _text(value) for key, value in settings.items()}
    new = [Param(_key(key), text) for key, text in texts.items() if _key(key) not in before]
    for begin in range(0, len(new), _PARAMS):
        client.log_batch(run_id, params=new[begin : begin + _PARAMS])
    return {
        f"changed.{_key(key)}": text
        for key, text in texts.items()
        if before.get(_key(key), text) != text
    }


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text[:_TEXT] or '""'


def _key(text: str) -> str:
    """Return a name as MLflow takes one."""
    return "".join(c if c.isalnum() or c in "_-. /" else "_" for c in text)[:250]


def _metric(name: str, value: float, when: float, step: int) -> Any:
    from mlflow.entities import Metric

    return Metric(_key(name), float(value), int(1000 * when), step)


def _is_figure(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _steps(run: Run) -> Iterator[Any]:
    """Yield the logged steps; MLflow keeps one value for a step that is there already."""
    for line in run.metrics:
        step, when = line.get("step"), line.get("time")
        if not isinstance(step, int) or not isinstance(when, int | float):
            continue
        for name, value in line.items():
            if name not in _NOT_METRICS and _is_figure(value):
                yield _metric(name, value, when, step)


def _figures(run: Run, state: State) -> Iterator[Any]:
    """Yield what came of the run as a whole."""
    when = run.status.get("updated") or 0
    for name, value in outcome(run, state).items():
        if name not in ("step", "loss", "val_loss") and _is_figure(value):
            yield _metric(f"outcome/{name}", value, float(when), 0)


def _evaluations(run: Run) -> Iterator[Any]:
    for path in sorted((run.path / files.EVALS).glob("*.json")):
        result = files.read_json_or_none(path)
        if not isinstance(result, dict):
            continue
        for name, value in figures(result).items():
            yield _metric(f"eval/{name}", value, float(result.get("created") or 0), 0)


def figures(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the candidate's figures of an evaluation by suite.task.metric."""
    found = {}
    tasks = result.get("tasks")
    for task, block in tasks.items() if isinstance(tasks, dict) else ():
        for metric, groups in (block.get("metrics") or {}).items():
            value: Any = ((groups.get("all") or {}).get("candidate") or {}).get("value")
            if _is_figure(value):
                found[f"{result.get('suite')}.{task}.{metric}"] = float(value)
    return found


def data_hash(run: Run) -> str | None:
    """Return one hash of the run's local data files, None if it names none."""
    listed = run.provenance.get("data")
    hashes = [str(each.get("sha256")) for each in listed or [] if isinstance(each, dict)]
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest() if hashes else None


def _tags(run: Run, state: State) -> dict[str, Any]:
    record, made, status = run.provenance, run.submission, run.status
    kit, model = record.get("kit") or {}, record.get("model") or {}
    found = {
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
    return {key: value for key, value in found.items() if value not in (None, "")}


def _lineage(client: Any, run_id: str, run: Run) -> None:
    """Log the data files and the base model as the run's inputs."""
    from mlflow.entities import Dataset, DatasetInput

    inputs = []
    for each in run.provenance.get("data") or []:
        if not isinstance(each, dict) or not each.get("file"):
            continue
        path = Path(str(each["file"]))
        digest = str(each.get("sha256") or each.get("bytes"))[:36]
        source = json.dumps({"uri": path.as_posix()})
        profile = json.dumps({"bytes": each.get("bytes")})
        inputs.append(
            DatasetInput(Dataset(path.name, digest, "local", source, profile=profile), tags=[])
        )
    if inputs:
        client.log_inputs(run_id, datasets=inputs)
