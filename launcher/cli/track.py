"""cookbook track"""

import json

import click

from launcher import site as sites
from launcher.cli.common import cluster_option, json_option, note, runs_root
from launcher.errors import UnknownRun
from launcher.runs.find import every, find, none_yet
from launcher.tracking import importer
from launcher.tracking import store as stores


@click.command()
@click.argument("wanted", nargs=-1, metavar="[RUN]...")
@click.option("--uri", metavar="URI", help="An MLflow server. [default: the site's tracking]")
@json_option
@cluster_option
def track(wanted: tuple[str, ...], uri: str | None, as_json: bool, cluster: str | None) -> None:
    """Write all runs, or each RUN, into MLflow: parameters, metrics, tags, artefacts, lineage.

    It can be repeated: what is new is added. Nodes write files only; this command alone writes the
    store.
    """
    site, root = sites.load(cluster), runs_root(cluster)
    runs = [find(root, each) for each in wanted] if wanted else every(root)
    if not runs:
        raise UnknownRun(none_yet(root))
    store = stores.at(site.root, uri or site.tracking)
    done = []
    with stores.opened(store) as client:
        for name, words in importer.import_runs(client, store, dict.fromkeys(runs)):
            done.append({"run": name, "done": words})
            if words.startswith("passed over"):
                note(f"{name}: {words}")
            elif not as_json:
                click.echo(f"{name}: {words}")
    if as_json:
        click.echo(json.dumps({"uri": store.uri, "runs": done}, indent=1))
    elif store.embedded:
        serve = f"mlflow server --backend-store-uri {store.uri} --host 127.0.0.1 --port 5000"
        note(f"look at them with: {serve}")
