"""From the log of an endpoint to a data source, with a data recipe that names it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import yamlfile
from launcher.site import Site
from plugins.serve.launcher.endpoint import Endpoint, output_of
from runspec import files


@dataclass(frozen=True)
class MadeOfRequests:
    """A data source made of a log of requests."""

    folder: Path
    # The data recipe that reads it.
    recipe: Path
    # Of plugins.serve.from_requests: rows, with_feedback, rejected answers by word, and the numbers
    # of the lines of the file `feedback` that were not used: unmatched_lines, unreadable_lines.
    counts: dict[str, Any]


def export(
    site: Site, endpoint: Endpoint, since: str | None, feedback: Path | None
) -> MadeOfRequests:
    """Write the answered requests of an endpoint as Parquet, and a data recipe that reads them.

    Args:
        since: 90m, 12h, 3d or a date; None for all.
        feedback: JSON lines with request_id, feedback and label; None for the endpoint's own.

    Raises:
        EndpointFault: nothing is logged, or it cannot be read.
    """
    folder = site.root / "datasets" / f"requests-{endpoint.name}"
    argv = ["--since", since] if since else []
    argv += ["--feedback", str(feedback.absolute())] if feedback else []
    told = output_of("plugins.serve.from_requests", str(endpoint.folder), str(folder), *argv)
    answer = json.loads(told.splitlines()[-1])
    recipe = folder / f"requests-{endpoint.name}.yaml"
    content = data_recipe(endpoint.name, Path(answer["file"]))
    files.write_text(recipe, yamlfile.dump(content))
    return MadeOfRequests(
        folder, recipe, {key: each for key, each in answer.items() if key != "file"}
    )


def data_recipe(name: str, place: Path) -> dict[str, Any]:
    """Return a data recipe that makes a training set of an endpoint's log, a Parquet file."""
    source = {
        "name": f"requests-{name}",
        "path": str(place),
        "format": "messages",
        "keep": {"request_id": "text", "feedback": "text", "label": "text"},
    }
    return {
        "description": f"Requests and answers of the endpoint {name}",
        "sources": [source],
        "steps": [
            "exact_duplicates",
            "personal_data",
            {"split": {"shares": {"train": 0.9, "val": 0.1}}},
        ],
    }
