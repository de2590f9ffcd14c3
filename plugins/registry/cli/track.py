"""cookbook track"""

import json

import click

from launcher import site as sites
from launcher.cli import completion
from launcher.cli.common import cluster_option, json_option, note, runs_root
from launcher.errors import UnknownRun
from launcher.run.find import every, find, none_yet
from plugins.registry.launcher import store as stores
from plugins.registry.launcher import tracking, weights_and_biases


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
    for name, outcome in tracking.import_runs(store, dict.fromkeys(runs)):
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
