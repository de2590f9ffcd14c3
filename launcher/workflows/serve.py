"""Endpoints: served models that are found by name, replaced without a gap, and stopped."""

import os
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import paths, venv
from launcher import site as sites
from launcher.errors import CookbookError, EndpointFault, RecipeFault, UsageFault, nearest
from launcher.recipes import recipe as recipe_file
from launcher.recipes.recipe import NAME, NAME_RULE, time_limit_s
from launcher.runs import directory
from launcher.runs.directory import Run
from launcher.runs.states import state_of
from launcher.site import Site
from launcher.workflows import models
from launcher.workflows import submit as submission
from launcher.workflows.cancel import cancel
from runspec import endpoint as endpoints
from runspec import files
from runspec.states import process_start

Say = Callable[[str], None]
# A successor is asked for so long before the time limit, beside the time that a start took.
_LEAD_S = 900
_POLL_S = 1.0
# A gateway reads the replicas' files twice a second.
_SEEN_S = 3.0


@dataclass(frozen=True)
class Endpoint:
    """An endpoint by its folder."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def facts(self) -> dict[str, Any]:
        """What is served: the model as it was named, the runs, the settings."""
        found = files.read_json_or_none(self.folder / endpoints.ENDPOINT)
        return found if isinstance(found, dict) else {}

    @property
    def key_file(self) -> Path:
        return self.folder / endpoints.KEY

    @property
    def replicas(self) -> list[dict[str, Any]]:
        return endpoints.replicas(self.folder)

    def runs(self, root: Path) -> list[Run]:
        """Return its runs that are there, oldest first."""
        listed = [directory.runs_root(root) / str(name) for name in self.facts.get("runs") or []]
        return [Run(path) for path in listed if path.is_dir()]

    def living(self, root: Path) -> list[Run]:
        """Return its runs whose job waits or runs."""
        return [run for run in self.runs(root) if not state_of(run).ended]

    @property
    def gateway(self) -> dict[str, Any] | None:
        """The gateway's address and process, None if none runs on this host or another."""
        found = files.read_json_or_none(self.folder / endpoints.GATEWAY)
        if not isinstance(found, dict):
            return None
        here = found.get("host") == socket.gethostname()
        if here and process_start(int(found["pid"])) != found.get("process_start"):
            return None
        return found

    @property
    def url(self) -> str:
        """The address that clients use: the gateway's, else a ready replica's.

        Raises:
            EndpointFault: nothing serves it now.
        """
        gateway = self.gateway
        if gateway is not None:
            return str(gateway["url"])
        for each in self.replicas:
            if each.get("state") == "ready":
                return str(each["url"])
        raise EndpointFault(
            f"nothing serves {self.name} now: see cookbook serve --list, and start it with: "
            f"cookbook serve {self.facts.get('model', 'MODEL')} --name {self.name}"
        )


def every(site: Site) -> list[Endpoint]:
    """Return all endpoints of a site by name."""
    found = sorted((site.root / "endpoints").glob(f"*/{endpoints.ENDPOINT}"))
    return [Endpoint(path.parent) for path in found]


def find(site: Site, name: str) -> Endpoint:
    """Return an endpoint by its name; UsageFault if there is none."""
    known = [each.name for each in every(site)]
    if name not in known:
        listed = (
            f"there are {', '.join(known)}" if known else "start one with: cookbook serve MODEL"
        )
        raise UsageFault(f"there is no endpoint {name!r}{nearest(name, known)}: {listed}")
    return Endpoint(site.root / "endpoints" / name)


def config_file(name: str) -> Path:
    """Return the file of a serving configuration, by its name or path."""
    is_path = name.endswith((".yaml", ".yml"))
    path = Path(name).expanduser().absolute() if is_path else paths.SERVE / f"{name}.yaml"
    if not path.is_file():
        known = sorted(each.stem for each in paths.SERVE.glob("*.yaml"))
        raise RecipeFault(
            f"there is no serving configuration {name!r}{nearest(name, known)}: one of "
            f"{', '.join(known)}, or the path of a YAML file"
        )
    return path


def name_of(model: models.Model, wanted: str | None) -> str:
    """Return an endpoint's name: the one wanted, else the registered one, else the run's."""
    if wanted is None:
        wanted = model.version.name if model.version else model.name
    if not NAME.match(wanted):
        raise UsageFault(
            f"the endpoint name {wanted!r} may hold only {NAME_RULE}: give --name NAME"
        )
    return wanted


def start(
    site: Site,
    wanted: str,
    name: str | None,
    config: str,
    overrides: Sequence[str],
    resources: Mapping[str, Any],
    local: bool,
    say: Say,
    add: bool = False,
) -> tuple[Endpoint, Run]:
    """Submit a job that serves a model; return the endpoint and the run.

    Args:
        wanted: what models.resolve takes.
        add: beside the runs that serve the endpoint now.

    Raises:
        UsageFault: the endpoint is served already, or what was given is wrong.
    """
    model = models.resolve(site, wanted)
    chosen = Endpoint(site.root / "endpoints" / name_of(model, name))
    if not add and (busy := chosen.living(site.root)):
        raise UsageFault(
            f"{chosen.name} is served already by {busy[-1].name}: replace it without a gap with "
            "--replace, add a version beside it with --share 0.1, or stop it with: "
            f"cookbook serve --stop {chosen.name}"
        )
    _make(chosen)
    given = {
        "endpoint": chosen.name,
        "endpoint_dir": chosen.folder,
        "model": model.folder,
        "key_file": chosen.key_file,
        "version": model.name,
    }
    file = config_file(config)
    texts = [f"{key}={value}" for key, value in given.items() if key != "version"]
    recipe = recipe_file.load(str(file), [*overrides, *texts], resources)
    recipe.config["version"] = model.name
    if recipe.entry.purpose != "serve":
        raise UsageFault(f"{file} serves nothing: its entry is {recipe.entry_name}, not serve")
    recipe = sites.complete(recipe, site, local)
    planned = submission.plan(recipe, site, f"serve-{chosen.name}"[:64])
    run = submission.submit(planned, submission.context(planned, local), say)
    before = [each.name for each in chosen.living(site.root)] if add else []
    facts = {
        "model": wanted,
        "config": config,
        "overrides": list(overrides),
        "resources": {key: value for key, value in resources.items() if value is not None},
        "local": local,
        "runs": [*before, run.name],
        "settings": {k: v for k, v in recipe.train_config(site.root, str(run.path)).items()},
    }
    files.write_json(chosen.folder / endpoints.ENDPOINT, facts, mode=0o600)
    return chosen, run


def _make(endpoint: Endpoint) -> None:
    """Make an endpoint's folder and key, once."""
    endpoint.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (endpoint.folder / endpoints.BACKENDS).mkdir(mode=0o700, exist_ok=True)
    if not endpoint.key_file.exists():
        files.write_text(endpoint.key_file, secrets.token_urlsafe(32) + "\n", mode=0o600)


def await_ready(endpoint: Endpoint, run: Run, timeout_s: float, say: Say) -> None:
    """Wait until a replica of a run is ready; EndpointFault if the run ends first."""
    deadline, asked = time.monotonic() + timeout_s, 0.0
    while time.monotonic() < deadline:
        if any(r.get("run") == run.name and r["state"] == "ready" for r in endpoint.replicas):
            return
        if time.monotonic() - asked > 5:
            asked, state = time.monotonic(), state_of(run)
            if state.ended:
                detail = f" ({state.detail})" if state.detail else ""
                raise EndpointFault(
                    f"{run.name} is {state.word}{detail}: cookbook logs --first-error {run.name}"
                )
            if state.word != "RUNNING":
                say(f"{run.name}: {state.word} {state.detail}".rstrip())
        time.sleep(_POLL_S)
    raise EndpointFault(
        f"{run.name} is not ready after {timeout_s:.0f} s: cookbook logs {run.name}"
    )


def start_gateway(endpoint: Endpoint, port: int = 0) -> str:
    """Start the gateway on this host, if none runs; return its address."""
    if (running := endpoint.gateway) is not None:
        return str(running["url"])
    (endpoint.folder / endpoints.GATEWAY).unlink(missing_ok=True)
    log = endpoint.folder / "gateway.log"
    argv = [str(venv.python()), "-m", "serving.gateway", str(endpoint.folder), "--port", str(port)]
    with open(log, "ab") as file:
        os.chmod(log, 0o600)
        process = subprocess.Popen(
            argv,
            cwd=paths.REPO_ROOT,
            env=venv.environment(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (running := endpoint.gateway) is not None and running["pid"] == process.pid:
            return str(running["url"])
        if process.poll() is not None:
            break
        time.sleep(0.1)
    words = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no message"]
    raise EndpointFault(f"the gateway of {endpoint.name} did not start: {words[-1]} (see {log})")


def replace(site: Site, endpoint: Endpoint, wanted: str | None, say: Say) -> Run:
    """Start a successor, wait until it is ready, then drain and end the runs before it."""
    facts = endpoint.facts
    before = endpoint.living(site.root)
    _, run = start(
        site,
        wanted or str(facts["model"]),
        endpoint.name,
        str(facts["config"]),
        facts.get("overrides") or [],
        facts.get("resources") or {},
        bool(facts.get("local")),
        say,
        add=True,
    )
    say(f"{run.name} is to take the place of {', '.join(each.name for each in before) or 'none'}")
    await_ready(endpoint, run, _start_limit(endpoint), say)
    drain(site, endpoint, before, say)
    (endpoint.folder / endpoints.SHARES).unlink(missing_ok=True)
    return run


def _start_limit(endpoint: Endpoint) -> float:
    return float((endpoint.facts.get("settings") or {}).get("start_timeout_s") or 1800)


def drain(site: Site, endpoint: Endpoint, runs: Sequence[Run], say: Say) -> None:
    """Let runs end what they answer now, and end them; other replicas get what comes."""
    names = {run.name for run in runs}
    for each in endpoint.replicas:
        if each.get("run") in names:
            endpoints.drain_mark(endpoint.folder, each["name"]).touch()
    timeout = float((endpoint.facts.get("settings") or {}).get("request_timeout_s") or 600)
    began = time.monotonic()
    while time.monotonic() - began < timeout + _SEEN_S:
        left = [each for each in endpoint.replicas if each.get("run") in names]
        quiet = all(e["state"] == "draining" and not e.get("in_flight") for e in left)
        if quiet and time.monotonic() - began > _SEEN_S:
            break
        time.sleep(0.5)
    for run in runs:
        with suppress(CookbookError):
            say(cancel(run))
    facts = endpoint.facts
    facts["runs"] = [name for name in facts.get("runs") or [] if name not in names]
    files.write_json(endpoint.folder / endpoints.ENDPOINT, facts, mode=0o600)


def share(endpoint: Endpoint, versions: Mapping[str, float]) -> None:
    """Set the share of the traffic of each version."""
    files.write_json(endpoint.folder / endpoints.SHARES, dict(versions), mode=0o600)


def stop(site: Site, endpoint: Endpoint, say: Say) -> None:
    """End an endpoint's jobs and its gateway; its log and its key stay."""
    for run in endpoint.living(site.root):
        say(cancel(run))
    gateway = endpoint.gateway
    if gateway is None:
        return
    if gateway["host"] != socket.gethostname():
        say(f"the gateway runs on {gateway['host']}: repeat the command there to end it")
        return
    with suppress(ProcessLookupError):
        os.kill(int(gateway["pid"]), 15)
    say(f"the gateway {gateway['url']} has ended")


def due(site: Site, endpoint: Endpoint) -> Iterator[str]:
    """Yield why an endpoint's run has to be replaced now; nothing if it need not."""
    facts, living = endpoint.facts, endpoint.living(site.root)
    if not living:
        yield "no job serves it"
        return
    run = living[-1]
    if str(facts.get("model")).startswith("models:/"):
        version = models.registered(site, str(facts["model"]))
        now = str((facts.get("settings") or {}).get("version"))
        if now != f"{version.name} v{version.number}":
            yield f"{facts['model']} is v{version.number} now, and {now} is served"
    limit = run.asked["time"]
    began = [run.status.get("started"), *(each.get("started") for each in run.attempts)]
    known = [each for each in began if isinstance(each, int | float)]
    if limit and known and not facts.get("local"):
        left = time_limit_s(limit) - (time.time() - min(known))
        if left < min(_LEAD_S, time_limit_s(limit) / 4):
            yield f"its time limit is {max(0, left):.0f} s away"


def keep(site: Site, endpoint: Endpoint, say: Say, once: bool, pause_s: float = 15) -> None:
    """Look after an endpoint: its gateway, its alias, its time limit and its death."""
    while True:
        start_gateway(endpoint)
        for reason in due(site, endpoint):
            say(f"{endpoint.name}: {reason}")
            replace(site, endpoint, None, say)
            break
        if once:
            return
        time.sleep(pause_s)
