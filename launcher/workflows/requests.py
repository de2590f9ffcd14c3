"""From the log of an endpoint to a data source, with a data recipe that names it."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import paths, venv, yamlfile
from launcher.errors import EndpointFault
from launcher.site import Site
from launcher.workflows.endpoint import Endpoint
from runspec import files


@dataclass(frozen=True)
class Source:
    """A data source made of a log: its folder, its data recipe, and how many rows it has."""

    folder: Path
    recipe: Path
    rows: int
    with_feedback: int


def export(site: Site, endpoint: Endpoint, since: str | None, feedback: Path | None) -> Source:
    """Write the answered requests of an endpoint as Parquet, and a data recipe that reads them.

    Args:
        since: 90m, 12h, 3d or a date; None for all.
        feedback: JSON lines with request_id, feedback and label; None for the endpoint's own.

    Raises:
        EndpointFault: nothing is logged, or it cannot be read.
    """
    folder = site.root / "datasets" / f"requests-{endpoint.name}"
    argv = [str(venv.python()), "-m", "serving.source", str(endpoint.folder), str(folder)]
    argv += ["--since", since] if since else []
    argv += ["--feedback", str(feedback.absolute())] if feedback else []
    done = subprocess.run(
        argv,
        cwd=paths.REPO_ROOT,
        env=venv.environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        words = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise EndpointFault(words.removeprefix("error: "))
    told = json.loads(done.stdout.splitlines()[-1])
    recipe = folder / f"requests-{endpoint.name}.yaml"
    content = data_recipe(endpoint.name, folder)
    files.write_text(recipe, yamlfile.dump(content))
    return Source(folder, recipe, int(told["rows"]), int(told["with_feedback"]))


def data_recipe(name: str, folder: Path) -> dict[str, Any]:
    """Return a data recipe that makes a training set of an endpoint's log, as `folder` holds it."""
    source = {
        "name": f"requests-{name}",
        "path": str(folder / "requests.parquet"),
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
