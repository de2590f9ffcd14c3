"""cookbook track"""

import json
from collections.abc import Iterable, Iterator

import click

from launcher import site as sites
from launcher.cli import completion
from launcher.cli.common import cluster_option, json_option, note, runs_root
from launcher.errors import CookbookError, UnknownRun
from launcher.look.outcome import configuration
from launcher.run.directory import Run
from launcher.run.find import every, find, none_yet
from plugins.registry.launcher import importer, weights_and_biases
from plugins.registry.launcher import store as stores


@click.command()
@click.argument("wanted", nargs=-1, metavar="[RUN]...", shell_complete=completion.runs)
@click.option(
    "--uri",
    metavar="WHERE",
    help="An MLflow server's address, mlflow, or wandb[:[ENTITY/]PROJECT]. [default: the site's]",
)
@json_option
@cluster_option
def track(wanted: tuple[str, ...], uri: str | None, as_json: bool, cluster: str | None) -> None:
    """Write all runs, or each RUN, to MLflow or W&B: parameters, metrics, tags, files, lineage.

    It can be repeated: only new data is added. Nodes write only files; only this command writes to
    the store.
    """
    site, root = sites.load(cluster), runs_root(cluster)
    store = stores.at(site.root, uri or site.tracking)
    runs = [find(root, each) for each in wanted] if wanted else every(root)
    if not runs:
        raise UnknownRun(none_yet(root))
    done = []
    for name, outcome in _imported(store, dict.fromkeys(runs)):
        done.append({"run": name, "done": outcome})
        if outcome.startswith("skipped"):
            note(f"{name}: {outcome}")
        elif not as_json:
            click.echo(f"{name}: {outcome}")
    if as_json:
        click.echo(json.dumps({"uri": store.wandb or store.uri, "runs": done}, indent=1))
    elif store.wandb:
        if folder := weights_and_biases.offline(store):
            note(f"upload them with: wandb sync {folder}/offline-run-*")
    elif store.embedded:
        serve = f"mlflow server --backend-store-uri {store.uri} --host 127.0.0.1 --port 5000"
        note(f"view them with: {serve}")


def _imported(store: stores.Store, runs: Iterable[Run]) -> Iterator[tuple[str, str]]:
    """Write runs; yield each one's name and what was done."""
    if store.wandb:
        yield from weights_and_biases.import_runs(store, runs)
        return
    with stores.opened(store) as client:
        yield from importer.import_runs(client, store, runs)


def track_at_the_end(runs: Iterable[Run]) -> None:
    """Write runs that have ended where their recipe or site says, if one does."""
    for run in runs:
        site = sites.load(run.submission.get("site"))
        wanted = configuration(run).get("tracking") or site.tracking
        if not wanted:
            continue
        try:
            for name, outcome in _imported(stores.at(site.root, str(wanted)), [run]):
                note(f"tracking: {name} {outcome}")
        except CookbookError as error:
            # The run's own end counts; it can be imported at any time.
            note(f"warning: not tracked: {error.faults[0]}; then: cookbook track {run.name}")
