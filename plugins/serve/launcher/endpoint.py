"""An endpoint by its folder: the versions that it serves, its runs, its servers, its address."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from launcher.errors import EndpointFault, UsageFault, nearest
from launcher.run import directory
from launcher.run.directory import Run
from launcher.run.states import states
from launcher.site import Site
from launcher.slurm import executors
from plugins.serve import endpoint as endpoints
from runspec import files, lock


@dataclass(frozen=True)
class Deployment:
    """One version that an endpoint serves: what was asked for, and the runs that do it."""

    # The run, the folder or models:/NAME@ALIAS.
    model: str
    # Which one that was, such as support-intent v2.
    version: str
    # In configs/serve, or a path.
    config: str = "default"
    overrides: Sequence[str] = ()
    resources: dict[str, Any] = field(default_factory=dict)
    # The name of what runs its jobs.
    executor: str = "slurm"
    # How many runs are wanted.
    replicas: int = 1
    # Those that have ended stay here until the version is replaced.
    runs: Sequence[str] = ()

    @property
    def queued(self) -> bool:
        """Whether its jobs wait in a queue and have time limits."""
        return executors.named(self.executor).queued


@dataclass(frozen=True)
class Endpoint:
    """An endpoint by its folder."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def facts(self) -> dict[str, Any]:
        """The content of endpoint.json: the versions that are served, and the front's settings."""
        return files.read_object(self.folder / endpoints.ENDPOINT) or {}

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.facts.get("settings") or {})

    @property
    def deployments(self) -> list[Deployment]:
        """The versions, oldest first."""
        known = {each.name for each in fields(Deployment)}
        listed = self.facts.get("served")
        return [
            Deployment(**{key: value for key, value in each.items() if key in known})
            for each in (listed if isinstance(listed, list) else [])
        ]

    def write(
        self, deployments: Sequence[Deployment], settings: dict[str, Any] | None = None
    ) -> None:
        """Write which versions are served now."""
        content = {**self.facts, "served": [asdict(each) for each in deployments]}
        content |= {} if settings is None else {"settings": settings}
        files.write_json(self.folder / endpoints.ENDPOINT, content, mode=0o600)

    @contextmanager
    def alone(self, wait_s: float = 0.0) -> Iterator[None]:
        """Let no other command change what it serves meanwhile; EndpointFault if one does."""
        try:
            file = lock.take(self.folder / files.LOCK, wait_s)
        except lock.Held as held:
            raise EndpointFault(
                f"another command is changing {self.name} ({held}): wait for it, and try again"
            ) from held
        with file:
            yield

    @property
    def key_file(self) -> Path:
        return self.folder / endpoints.KEY

    @property
    def servers(self) -> list[dict[str, Any]]:
        return endpoints.servers(self.folder)

    def living(self, root: Path, of: Deployment | None = None) -> list[Run]:
        """Return its runs whose job waits or runs, oldest first; those of one version if given."""
        chosen = self.deployments if of is None else [of]
        names = [name for each in chosen for name in each.runs]
        runs = [Run(directory.runs_root(root) / name) for name in names]
        known = states(run for run in runs if run.path.is_dir())
        return [run for run in runs if run.name in known and not known[run.name].ended]

    @property
    def gateway(self) -> dict[str, Any] | None:
        """The gateway's address and process, None if none runs on this host or another."""
        return endpoints.gateway(self.folder)

    @property
    def url(self) -> str:
        """The address that clients on this host use: the gateway's, else a ready server's.

        Raises:
            EndpointFault: nothing serves it now, or this host cannot reach it.
        """
        address = endpoints.address(self.folder)
        if address is not None:
            return address
        ready = [each["machine"] for each in self.servers if each.get("state") == "ready"]
        if there := [str(self.gateway["host"])] if self.gateway else ready:
            raise EndpointFault(
                f"{self.name} listens on the loopback address of {there[0]}, which this host "
                "cannot reach: run the command there, or serve it with bind=node"
            )
        model = self.deployments[-1].model if self.deployments else "MODEL"
        raise EndpointFault(
            f"{self.name} is not served now: see cookbook serve --list, and start it with: "
            f"cookbook serve {model} --name {self.name}"
        )


def every(site: Site) -> Iterator[Endpoint]:
    """Yield all endpoints of a site by name."""
    for path in sorted((site.root / "endpoints").glob(f"*/{endpoints.ENDPOINT}")):
        yield Endpoint(path.parent)


def find(site: Site, name: str) -> Endpoint:
    """Return an endpoint by its name; UsageFault if there is none."""
    known = [each.name for each in every(site)]
    if name not in known:
        listed = (
            f"there are {', '.join(known)}" if known else "start one with: cookbook serve MODEL"
        )
        raise UsageFault(f"there is no endpoint {name!r}{nearest(name, known)}: {listed}")
    return Endpoint(site.root / "endpoints" / name)
