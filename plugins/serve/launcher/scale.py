"""Replicas by load: what the gateway wants is submitted, and what it does not need is ended."""

from collections.abc import Callable, Sequence
from dataclasses import replace as changed

from launcher.errors import EndpointFault
from launcher.run.directory import Run
from launcher.site import Site
from plugins.serve import endpoint as endpoints
from plugins.serve.launcher import maintain, serve
from plugins.serve.launcher.endpoint import Deployment, Endpoint

Say = Callable[[str], None]


def adjust(site: Site, endpoint: Endpoint, say: Say) -> None:
    """Make the number of each version's jobs what the gateway wants, without waiting for them.

    A job near its time limit counts no more: another one is submitted, and it ends at the limit.

    Raises:
        EndpointFault: what is missing would fail as the one before it.
    """
    going: list[Run] = []
    with endpoint.alone():
        wanted = endpoints.wanted(endpoint.folder)
        for deployment in endpoint.deployments:
            if deployment.max_replicas is None:
                continue
            count = wanted.get(deployment.version, deployment.replicas)
            living = endpoint.living(site.root, deployment)
            near = maintain.near_limit(endpoint, living) if deployment.queued else {}
            staying = [run for run in living if run.name not in near]
            if count > len(staying):
                _more(site, endpoint, deployment, living, count - len(staying), say)
            else:
                going += living if count == 0 else _superfluous(endpoint, staying, count)
    if going:
        say(f"{endpoint.name}: {', '.join(run.name for run in going)} is no longer needed")
        serve.drain(endpoint, going, say)


def _more(
    site: Site,
    endpoint: Endpoint,
    deployment: Deployment,
    living: Sequence[Run],
    count: int,
    say: Say,
) -> None:
    if fault := serve.failed_start(site, endpoint):
        raise EndpointFault(
            f"{fault}: fix it, then: cookbook serve {deployment.model} --name {endpoint.name} "
            "--replace"
        )
    new, runs, settings = serve.launch(site, endpoint, _pinned(deployment), count, say)
    names = [*(run.name for run in living), *new.runs]
    others = [
        changed(deployment, runs=names) if each == deployment else each
        for each in endpoint.deployments
    ]
    endpoint.write(others, settings)
    say(f"{endpoint.name}: {', '.join(run.name for run in runs)} will serve {deployment.version}")


def _pinned(deployment: Deployment) -> Deployment:
    """Return the same by its version: an alias may name another one by now."""
    if not deployment.model.startswith("models:/"):
        return deployment
    name, _, number = deployment.version.rpartition(" v")
    return changed(deployment, model=f"models:/{name}/{number}")


def _superfluous(endpoint: Endpoint, runs: Sequence[Run], count: int) -> list[Run]:
    """Return which runs to end: first those that are not ready, then the newest."""
    ready = {each.get("run") for each in endpoint.servers if each["state"] == "ready"}
    ordered = sorted(enumerate(runs), key=lambda pair: (pair[1].name not in ready, pair[0]))
    return [run for _, run in ordered[count:]]
