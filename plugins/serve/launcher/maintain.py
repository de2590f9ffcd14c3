"""Looking after an endpoint: its gateway, its aliases, its time limits, and runs that died."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace as changed

from launcher.do import models
from launcher.errors import CookbookError, EndpointFault
from launcher.recipe.model import time_limit_s
from launcher.run.directory import Run
from launcher.site import Site
from plugins.serve.launcher import gateway, serve
from plugins.serve.launcher.endpoint import Deployment, Endpoint

Say = Callable[[str], None]
# A successor is asked for as long before Slurm's warning, which ends a server, as the last start
# took, and so much earlier: as long again and 20 minutes, but at most a quarter of the time that
# the limit leaves, and more than the pauses of this file and of a gateway and Slurm's own: it looks
# for limits every half a minute, and warns so much too early.
_MARGIN_S, _LEAST_S = 1200, 45


def maintain(site: Site, endpoint: Endpoint, say: Say, once: bool, pause_s: float = 15) -> None:
    """Look after an endpoint once, or until it is interrupted.

    Raises:
        EndpointFault: with `once`, what serves it cannot be replaced; what serves goes on.
    """
    last_fault = ""
    while True:
        try:
            look(site, endpoint, say)
            last_fault = ""
        except CookbookError as error:
            if once:
                raise
            if error.faults[0] != last_fault:
                last_fault = error.faults[0]
                say(f"{endpoint.name}: {last_fault}")
        if once:
            return
        time.sleep(pause_s)


def look(site: Site, endpoint: Endpoint, say: Say) -> None:
    """Start what is missing, and replace what has to be replaced."""
    if gateway.end_hung(endpoint):
        say(f"{endpoint.name}: the gateway did not answer: it was killed, and is restarted")
    if endpoint.gateway is None:
        say(f"{endpoint.name}: gateway {gateway.start(endpoint)}")
    for deployment in endpoint.deployments:
        moved = _moved(site, deployment)
        living = endpoint.living(site.root, deployment)
        going, count, reason = due(endpoint, deployment, living)
        if not (reason := moved or reason):
            continue
        if fault := serve.failed_start(site, endpoint):
            raise EndpointFault(
                f"{reason}, and {fault}: fix it, then: cookbook serve {deployment.model} "
                f"--name {endpoint.name} --replace"
            )
        say(f"{endpoint.name}: {reason}")
        with endpoint.alone(60):
            if moved:
                serve.replace(site, endpoint, changed(deployment, runs=()), say)
                return
            serve.renew(site, endpoint, deployment, going, count, say)


def _moved(site: Site, deployment: Deployment) -> str:
    """Say that a version's alias names another one now, "" if it does not."""
    if not deployment.model.startswith("models:/"):
        return ""
    version = models.registered(site, deployment.model).name
    now = version.rpartition(" ")[2]
    moved = f"{deployment.model} is {now} now, and {deployment.version} is served"
    return "" if deployment.version == version else moved


def due(
    endpoint: Endpoint, deployment: Deployment, living: Sequence[Run]
) -> tuple[Sequence[Run], int, str]:
    """Return which runs have to be replaced, by how many, and why; "" if nothing has to be done."""
    if deployment.queued and (soon := near_limit(endpoint, living)):
        left = f"{min(soon.values()):.0f} s"
        reason = f"the time limit of {', '.join(soon)} is near: Slurm warns of it in {left}"
        return [run for run in living if run.name in soon], len(soon), reason
    missing = deployment.replicas - len(living)
    if missing > 0:
        reason = f"{len(living)} of {deployment.replicas} jobs serve {deployment.version}"
        return (), missing, reason
    return (), 0, ""


def near_limit(endpoint: Endpoint, runs: Sequence[Run]) -> dict[str, float]:
    """Return the runs that Slurm warns soon of their time limit, and how soon."""
    starts = {str(each.get("run")): float(each.get("start_s") or 0) for each in endpoint.servers}
    seconds_left = {}
    for run in runs:
        asked, began = run.asked, run.job_began
        if not asked["time"] or began is None or run.status.get("state") != "RUNNING":
            continue
        window = time_limit_s(asked["time"]) - (asked["signal_lead_s"] or 0)
        left, start = window - (time.time() - began), starts.get(run.name, 0.0)
        if left < start + max(_LEAST_S, min(_MARGIN_S + start, window / 4)):
            seconds_left[run.name] = max(0.0, left)
    return seconds_left
