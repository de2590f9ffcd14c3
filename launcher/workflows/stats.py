"""What the log of a served model says, asked of the environment that can read it."""

from collections.abc import Callable, Sequence
from pathlib import Path

from launcher.errors import CookbookError, EndpointFault
from launcher.runs.directory import Run
from launcher.site import Site
from launcher.workflows import endpoint as endpoints
from launcher.workflows import models
from launcher.workflows.endpoint import Endpoint

Say = Callable[[str], None]


def figures(
    site: Site, endpoint: Endpoint, since: str | None, say: Say, as_json: bool = False
) -> str:
    """Return an endpoint's figures as lines, or as JSON; EndpointFault if it has no requests."""
    argv = ["--since", since] if since else []
    for file in _trained_on(site, endpoint, say):
        argv += ["--training-data", file]
    argv += ["--json"] if as_json else []
    return endpoints.said("serving.stats", str(endpoint.folder), *argv)


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


def of_runs(site: Site, runs: Sequence[Run], say: Say) -> list[tuple[str, list[str]]]:
    """Return the figures, as lines, of the endpoints that runs serve, or whose model they made."""
    chosen, texts = [run.path.resolve() for run in runs], []
    for endpoint in endpoints.every(site):
        model = Path(str(endpoint.settings.get("model") or "/")).resolve()
        serving = {name for served in endpoint.served for name in served.runs}
        if not any(path in model.parents or path.name in serving for path in chosen):
            continue
        try:
            texts.append((endpoint.name, figures(site, endpoint, None, say).splitlines()))
        except EndpointFault as error:
            say(f"skipped: endpoint {endpoint.name}: {error.faults[0]}")
    return texts
