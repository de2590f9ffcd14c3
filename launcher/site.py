"""What a site has to say about itself: configs/clusters/<name>.yaml, all of it optional."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher import paths, yamlfile
from launcher.errors import RecipeFault, SlurmFault, nearest
from launcher.recipe.environment import variable_faults
from launcher.recipe.model import Recipe, Resources
from runspec.keys.common import COMMON
from runspec.keys.key import NAME, NAME_RULE, Fault, faults, keys_of, option

if TYPE_CHECKING:
    from launcher.slurm.job import Executor


@dataclass(frozen=True)
class Site:
    """A site's settings; what a recipe or an option says comes before its resources."""

    name: str = "default"
    description: str | None = option("text", "One line about the site.")
    shared_root: str | None = option("text", "The folder that login and compute nodes share.")
    gpu: str | None = option("text", "Kind of the GPUs, as in configs/gpus.yaml.")
    gpu_request: str = option(
        "gpus-per-node | gres | none", "How GPUs are asked for.", "gpus-per-node"
    )
    network_gbits: float | None = option("number", "Gbit/s of the network between nodes, per GPU.")
    network_interface: str | None = option("interface", "Interface for NCCL and gloo.")
    signal_lead_s: int = option("positive", "Seconds between the warning and the limit.", 300)
    gpu_hour_price: float | None = option("number", "Price of a GPU-hour, for the cost of runs.")
    currency: str | None = option("text", "What that price is in.")
    node_paths: Sequence[str] = option("texts", "Paths that only the nodes have.")
    job_setup: Sequence[str] = option("texts", "Shell lines that a job runs first.")
    environment: dict[str, str] = option(
        "open block", "Environment variables of each job. No secrets."
    )
    trusted_users: Sequence[str] = option(
        "texts",
        "Users whose runs in the shared folder are replayed and adapters continued as one's own.",
    )
    default_environment: str | None = option(
        "name", "Name of a file in configs/environments, for all recipes."
    )
    # What a recipe and a site may both say: the recipe's comes first.
    resources: dict[str, Any] = field(default_factory=dict)
    share: str = "private"
    tracking: str | None = None

    @property
    def root(self) -> Path:
        """The folder that login and compute nodes share."""
        return paths.shared_root(self.shared_root)


_SHARED = ("share", "resources", "tracking")
KEYS = keys_of(Site) | {name: key for name, key in COMMON.items() if name.startswith(_SHARED)}


def load(name: str | None = None) -> Site:
    """Return the named site's settings, else COOKBOOK_CLUSTER's, else default.yaml's, else none.

    RecipeFault lists every fault of the file.
    """
    chosen = name or os.environ.get("COOKBOOK_CLUSTER") or "default"
    if not NAME.match(chosen):
        raise RecipeFault(f"the cluster name {chosen!r} may hold only {NAME_RULE}")
    path = paths.CLUSTERS / f"{chosen}.yaml"
    if not path.is_file():
        if chosen == "default":
            return Site()
        hint = nearest(chosen, sorted(file.stem for file in paths.CLUSTERS.glob("*.yaml")))
        copied = paths.CLUSTERS / "example.yaml"
        raise RecipeFault(f"there is no cluster file {path}{hint}: copy {copied} to it")
    config = yamlfile.load(path)
    if wrong := [*faults(config, KEYS), *_own_faults(config)]:
        raise RecipeFault([f"{fault.text}, in {_place(path, fault.key)}" for fault in wrong])
    values = {key: value for key, value in config.items() if value is not None}
    variables = values.get("environment", {})
    values["environment"] = {key: str(value) for key, value in variables.items()}
    return Site(name=chosen, **values)


def _place(path: Path, key: str) -> str:
    line = yamlfile.line_of(path, key)
    return f"{path}, line {line}" if line else str(path)


def _own_faults(config: dict[str, Any]) -> Iterator[Fault]:
    gpu, known = config.get("gpu"), yamlfile.load(paths.GPUS)
    if gpu is not None and gpu not in known:
        message = f"gpu must be one of {', '.join(known)} (configs/gpus.yaml), got {gpu!r}"
        yield Fault("gpu", message)
    given = config.get("node_paths")
    for path in given if isinstance(given, list) else []:
        if not str(path).startswith("/"):
            yield Fault("node_paths", f"node_paths must be absolute paths, got {path!r}")
    yield from variable_faults(config.get("environment"), "environment")


def complete(recipe: Recipe, site: Site, executor: "Executor | None" = None) -> Recipe:
    """Return a recipe with what it leaves open, from the site's file and from what sinfo reports.

    executor: what will run it; None for one with a queue.
    """
    resources = with_site_defaults(recipe.resources, site)
    if resources.cpus_per_gpu is None and (executor is None or executor.queued):
        resources = replace(resources, cpus_per_gpu=_cpus_per_gpu(resources))
    config = {**recipe.config, "share": recipe.config.get("share") or site.share}
    if given := recipe.config.get("environment") or site.default_environment:
        from launcher.recipe import environment  # most runs have none

        config["environment"] = environment.record(given)
    return replace(recipe, config=config, resources=resources)


def with_site_defaults(resources: Resources, site: Site) -> Resources:
    """Return resources with the site's values if the recipe and the options say nothing.

    Exclusive nodes come with all their memory unless something else is asked for.
    """
    given, unset = Resources.of(site.resources), Resources()
    missing = {
        item.name: getattr(given, item.name)
        for item in fields(Resources)
        if getattr(resources, item.name) == getattr(unset, item.name)
    }
    filled = replace(resources, **missing)
    return replace(filled, mem="0") if filled.exclusive and filled.mem is None else filled


def slurm_options(
    resources: Resources, site: Site, gpus: int, without: Iterable[str] = ()
) -> list[str]:
    """Return Slurm's options for a short job's resources, and for its GPUs per node."""
    left_out = (*without, "mail_user", "mail_type")
    options = [f"--{key}={value}" for key, value in resources.options(left_out).items()]
    request = {"gres": "--gres=gpu:", "gpus-per-node": "--gpus-per-node="}.get(site.gpu_request)
    kind = f"{resources.gpu_type}:" if resources.gpu_type else ""
    return [*options, f"{request}{kind}{gpus}"] if gpus and request else options


def _cpus_per_gpu(resources: Resources) -> int | None:
    """A GPU's share of the CPUs of the smallest node that has the GPUs; None if sinfo is silent."""
    # Imported late: most commands read a site's file and ask Slurm nothing.
    from launcher import slurm

    try:
        known = slurm.partitions(hidden=True)
    except SlurmFault:
        return None
    wanted = resources.partition.split(",") if resources.partition else None
    chosen = [p for name, p in known.items() if (name in wanted if wanted else p.default)]
    shares = []
    for kind in (kind for partition in chosen for kind in partition.kinds):
        gpus = sum(kind.gpus.values())
        usable = kind.gpus.get(resources.gpu_type, 0) if resources.gpu_type else gpus
        if gpus and usable >= resources.gpus_per_node and kind.cpus >= gpus:
            shares.append(kind.cpus // gpus)
    return min(shares, default=None)
