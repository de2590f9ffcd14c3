"""cookbook prepare from-requests"""

import json
from pathlib import Path

import click

from launcher import site as sites
from launcher.cli.common import cluster_option, json_option, note
from launcher.look.text import plain
from plugins.serve.cli.since import since_option
from plugins.serve.launcher import endpoint as endpoints
from plugins.serve.launcher import from_requests as workflow

_UNREADABLE = "are no JSON object with request_id, and with a text as label if any"
_FILE = click.Path(path_type=Path, dir_okay=False, exists=True)


@click.command("from-requests")
@click.argument("name")
@since_option("Only requests since")
@click.option("--feedback", type=_FILE, help="JSON lines with request_id, feedback and label.")
@json_option
@cluster_option
def from_requests(
    name: str,
    since: float | None,
    feedback: Path | None,
    as_json: bool,
    cluster: str | None,
) -> None:
    """Make a data source and a data recipe from the logged requests of the endpoint NAME.

    A label replaces the answer. An answer without one whose feedback is not up, yes, good, like,
    correct, true, positive or 1 is left out.
    """
    site = sites.load(cluster)
    made = workflow.export(site, endpoints.find(site, name), since, feedback)
    said = made.feedback
    if as_json:
        counts = {"rows": made.rows, "with_feedback": made.with_feedback}
        lines = {"unmatched_lines": said.unmatched, "unreadable_lines": said.unreadable}
        places = {"file": str(made.file), "recipe": str(made.recipe)}
        click.echo(json.dumps({**counts, "rejected": dict(said.rejected), **lines, **places}))
        return
    click.echo(f"{made.rows:,} requests, {made.with_feedback:,} with feedback: {made.file}")
    if said.rejected:
        words = ", ".join(f"{word} {count:,}" for word, count in said.rejected.items())
        note(plain(f"  left out       {said.rejected.total():,} rejected answers ({words})"))
    for numbers, why in (
        (said.unmatched, "match no request of the log"),
        (said.unreadable, _UNREADABLE),
    ):
        if numbers:
            shown = ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
            note(f"  not used       {len(numbers):,} lines {why}: {shown} of {said.path}")
    note(f"  prepare it     cookbook prepare {made.recipe}")
    note(f"  training data  dataset.data_files={made.file}")
