"""From run directories to MLflow: parameters, metrics, tags, artefacts and lineage.

Nodes write files only. This importer reads them and is the one that writes the store; it can be
repeated at any time, and writes what is new.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher import site as sites
from launcher.errors import CookbookError
from launcher.look.outcome import configuration
from launcher.run.directory import Run
from launcher.run.states import State, judged
from plugins.registry.launcher import facts
from plugins.registry.launcher import store as stores
from plugins.registry.launcher.store import Store
from runspec import files

# MLflow's limits of one call, and of a value.
_METRICS, _PARAMS, _TEXT = 1000, 100, 5000
_ENDS = {
    "COMPLETED": "FINISHED",
    "CANCELLED": "KILLED",
    "FAILED": "FAILED",
}
RUN_TAG = "cookbook.run"


def import_runs(client: Any, store: Store, runs: Iterable[Run]) -> Iterator[tuple[str, str]]:
    """Write runs into the store; yield each run's name and what was done or why not.

    One run that cannot be read keeps no other from being imported.
    """
    for run, state in judged(runs):
        if run.torn or not run.submission:
            yield run.name, "skipped: it is not a complete run directory"
            continue
        try:
            done = _import(client, store, run, state)
        except (CookbookError, OSError, ValueError, KeyError, TypeError) as error:
            done = f"skipped: {str(error).splitlines()[0] if str(error) else type(error)}"
        yield run.name, done


def import_ended(runs: Iterable[Run], say: Callable[[str], None]) -> None:
    """Write runs that have ended where their recipe or site says, if one does."""
    for run in runs:
        site = sites.load(run.submission.get("site"))
        where = configuration(run).get("tracking") or site.tracking
        if not where:
            continue
        store = stores.at(site.root, str(where))
        try:
            with stores.client(store) as client:
                for name, done in import_runs(client, store, [run]):
                    say(f"tracking: {name} {done}")
        except CookbookError as error:
            # The run's own end counts; it can be imported at any time.
            say(f"warning: not tracked: {error.faults[0]}; then: cookbook track {run.name}")


def node_program() -> str:
    """Return what prints the id of MLflow's run of a run on a node, before it is imported."""
    return '"$COOKBOOK/plugins/registry/mlflow_run.py"'


def find(client: Any, run_name: str) -> Any:
    """Return MLflow's run of a run directory, None if it is not imported."""
    experiments = [each.experiment_id for each in client.search_experiments()]
    wanted = f"tags.`{RUN_TAG}` = '{run_name}'"
    matching = client.search_runs(experiments, wanted, max_results=1) if experiments else []
    return matching[0] if matching else None


def _import(client: Any, store: Store, run: Run, state: State) -> str:
    tracked = find(client, run.name)
    mark = facts.fingerprint(run, state)
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
    metrics = list(_metrics(run, state))
    for begin in range(0, len(metrics), _METRICS):
        client.log_batch(run_id, metrics=metrics[begin : begin + _METRICS])
    for path in facts.artefacts(run):
        client.log_artifact(run_id, str(path), files.EVALS if path.parent != run.path else None)
    if new:
        _lineage(client, run_id, run)
    for key, value in {**facts.tags(run, state), **changed, "cookbook.imported": mark}.items():
        client.set_tag(run_id, key, str(value)[:_TEXT])
    if state.ended:
        ended = run.status.get("ended") or run.status.get("updated")
        at = int(1000 * ended) if isinstance(ended, int | float) else None
        client.set_terminated(run_id, _ENDS.get(state.word, "FAILED"), at)
    else:
        client.update_run(run_id, "SCHEDULED" if state.word == "PENDING" else "RUNNING")
    return f"{'imported' if new else 'updated'}: {len(metrics):,} values"


def _experiment(client: Any, store: Store, name: str) -> str:
    experiment = client.get_experiment_by_name(name)
    if experiment is not None:
        return str(experiment.experiment_id)
    # MLflow's default is a folder in the current directory.
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


def _metrics(run: Run, state: State) -> Iterator[Any]:
    """Yield all values; MLflow keeps one of a step that is there already."""
    from mlflow.entities import Metric

    for step, when, measured in facts.steps(run):
        for name, value in measured.items():
            yield Metric(_key(name), float(value), int(1000 * when), step)
    updated = float(run.status.get("updated") or 0)
    for name, value in facts.outcomes(run, state).items():
        yield Metric(_key(name), value, int(1000 * updated), 0)
    for name, value, when in facts.evaluations(run):
        yield Metric(_key(name), value, int(1000 * when), 0)


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
