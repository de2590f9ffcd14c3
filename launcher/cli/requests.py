"""cookbook prepare from-requests"""

import json
from pathlib import Path

import click

from launcher import site as sites
from launcher.cli.common import cluster_option, json_option, note, since_option
from launcher.workflows import endpoint as endpoints
from launcher.workflows import requests as workflow

_FILE = click.Path(path_type=Path, dir_okay=False, exists=True)


@click.command("from-requests")
@click.argument("name")
@since_option("Only those since")
@click.option("--feedback", type=_FILE, help="JSON lines of request_id, feedback and label.")
@json_option
@cluster_option
def from_requests(
    name: str, since: str | None, feedback: Path | None, as_json: bool, cluster: str | None
) -> None:
    """Make a data source of the logged requests of the endpoint NAME, and a data recipe of it.

    A label takes the place of the answer.
    """
    site = sites.load(cluster)
    made = workflow.export(site, endpoints.find(site, name), since, feedback)
    if as_json:
        told = {"rows": made.rows, "with_feedback": made.with_feedback}
        click.echo(json.dumps({**told, "folder": str(made.folder), "recipe": str(made.recipe)}))
        return
    click.echo(f"{made.rows:,} requests, {made.with_feedback:,} with feedback: {made.folder}")
    note(f"  prepare it     cookbook prepare {made.recipe}")
    note(f"  training data  dataset.data_files={made.folder / 'messages.jsonl'}")
