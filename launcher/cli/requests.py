"""cookbook prepare from-requests"""

import json
from pathlib import Path

import click

from launcher import site as sites
from launcher.cli.common import cluster_option, flag, json_option, note, since_option
from launcher.workflows import endpoint as endpoints
from launcher.workflows import requests as workflow

_FILE = click.Path(path_type=Path, dir_okay=False, exists=True)


@click.command("from-requests")
@click.argument("name")
@since_option("Only requests since")
@click.option(
    "--feedback", type=_FILE, help="JSON lines with request_id or client_id, feedback and label."
)
@flag("--delta", help="Merge them into a Delta table, which keeps what the log has dropped.")
@json_option
@cluster_option
def from_requests(
    name: str,
    since: str | None,
    feedback: Path | None,
    delta: bool,
    as_json: bool,
    cluster: str | None,
) -> None:
    """Make a data source and a data recipe from the logged requests of the endpoint NAME.

    A label replaces the answer. With --delta each call adds the requests that the table has not,
    and replaces those that got other feedback since.
    """
    site = sites.load(cluster)
    made = workflow.export(site, endpoints.find(site, name), since, feedback, delta)
    if as_json:
        answer = {"rows": made.rows, "with_feedback": made.with_feedback}
        click.echo(json.dumps({**answer, "folder": str(made.folder), "recipe": str(made.recipe)}))
        return
    click.echo(f"{made.rows:,} requests, {made.with_feedback:,} with feedback: {made.folder}")
    note(f"  prepare it     cookbook prepare {made.recipe}")
    note(f"  training data  dataset.data_files={made.folder / 'messages.jsonl'}")
