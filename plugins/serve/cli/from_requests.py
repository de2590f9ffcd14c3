"""cookbook prepare from-requests"""

import json
from pathlib import Path

import click

from launcher import site as sites
from launcher.cli.common import cluster_option, json_option, note, since_option
from launcher.look.text import plain
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
    since: str | None,
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
    counts = made.counts
    if as_json:
        answer = {"folder": str(made.folder), "recipe": str(made.recipe)}
        click.echo(json.dumps({**counts, **answer}))
        return
    click.echo(
        f"{counts['rows']:,} requests, {counts['with_feedback']:,} with feedback: {made.folder}"
    )
    if rejected := counts["rejected"]:
        words = ", ".join(f"{word} {count:,}" for word, count in rejected.items())
        note(plain(f"  left out       {sum(rejected.values()):,} rejected answers ({words})"))
    for kind, why in (("unmatched", "match no request of the log"), ("unreadable", _UNREADABLE)):
        if lines := counts[f"{kind}_lines"]:
            shown = ", ".join(map(str, lines[:5])) + (", ..." if len(lines) > 5 else "")
            note(f"  not used       {len(lines):,} lines {why}: {shown} of {counts['feedback']}")
    note(f"  prepare it     cookbook prepare {made.recipe}")
    note(f"  training data  dataset.data_files={made.folder / 'messages.jsonl'}")
