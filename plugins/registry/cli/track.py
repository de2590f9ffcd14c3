"""cookbook track"""

import json

import click

from launcher import site as sites
from launcher.cli.common import cluster_option, json_option, note, runs_root
from launcher.errors import UnknownRun
from launcher.run.find import every, find, none_yet
from plugins.registry.launcher import importer
from plugins.registry.launcher import store as stores


@click.command()
@click.argument("wanted", nargs=-1, metavar="[RUN]...")
@click.option(
    "--uri",
    metavar="WHERE",
    help="An MLflow server's address, or mlflow: a file beside the runs. [default: the site's]",
)
@json_option
@cluster_option
def track(wanted: tuple[str, ...], uri: str | None, as_json: bool, cluster: str | None) -> None:
    """Write all runs, or each RUN, to MLflow: parameters, metrics, tags, files, lineage.

    It can be repeated: only new data is added. Nodes write only files; only this command writes to
    the store.
    """
    site, root = sites.load(cluster), runs_root(cluster)
    store = stores.at(site.root, uri or site.tracking)
    runs = [find(root, each) for each in wanted] if wanted else every(root)
    if not runs:
        raise UnknownRun(none_yet(root))
    done = []
    with stores.client(store) as client:
        for name, outcome in importer.import_runs(client, store, dict.fromkeys(runs)):
            done.append({"run": name, "done": outcome})
            if outcome.startswith("skipped"):
                note(f"{name}: {outcome}")
            elif not as_json:
                click.echo(f"{name}: {outcome}")
    if as_json:
        click.echo(json.dumps({"uri": store.uri, "runs": done}, indent=1))
    elif store.embedded:
        serve = f"mlflow server --backend-store-uri {store.uri} --host 127.0.0.1 --port 5000"
        note(f"view them with: {serve}")
