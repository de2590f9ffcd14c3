"""What the log of a served model says, asked of the environment that can read it."""

from collections.abc import Callable
from pathlib import Path

from launcher import venv
from launcher.errors import CookbookError
from launcher.site import Site
from launcher.workflows import models
from launcher.workflows.endpoint import Endpoint

Say = Callable[[str], None]


def command(site: Site, endpoint: Endpoint, since: str | None, say: Say) -> list[str]:
    """Return the command that prints an endpoint's figures."""
    argv = [str(venv.python()), "-m", "serving.stats", str(endpoint.folder)]
    argv += ["--since", since] if since else []
    for file in _trained_on(site, endpoint, say):
        argv += ["--training-data", file]
    return argv


def _trained_on(site: Site, endpoint: Endpoint, say: Say) -> list[str]:
    """Return the files that the newest served model was trained on."""
    try:
        model = models.resolve(site, endpoint.served[-1].model) if endpoint.served else None
    except CookbookError as error:
        say(f"warning: no drift is computed: {error.faults[0]}")
        return []
    listed = model.run.provenance.get("data") if model and model.run else None
    names = [str(each.get("file")) for each in listed or [] if isinstance(each, dict)]
    return [name for name in names if name.endswith((".jsonl", ".json")) and Path(name).is_file()]
