"""What a site has to say about itself: configs/clusters/<name>.yaml, all of it optional."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher import paths, yamlfile
from launcher.errors import RecipeFault, nearest
from launcher.recipe import (
    NAME,
    NAME_RULE,
    RESOURCES,
    Kind,
    environment_faults,
    faults_in,
)

# How a site wants GPUs to be asked for; none is for partitions that do not track them.
GPU_REQUESTS = ("gpus-per-node", "gres", "none")

_KEYS: dict[str, Kind] = {
    "description": "text",
    "shared_root": "text",
    "gpu": "text",
    "gpu_request": "text",
    "network_gbits": "number",
    "network_interface": re.compile(r"[A-Za-z0-9=^][A-Za-z0-9_.,=^-]{0,63}\Z"),
    "signal": re.compile(r"(?:USR1|USR2|HUP|INT|CONT)\Z"),
    "signal_lead_s": "positive",
    "node_paths": "list",
    "job_setup": "list",
    "environment": "mapping",
    "resources": "mapping",
}


@dataclass(frozen=True)
class Cluster:
    """A site's settings; what a recipe or an option says comes before its resources."""

    name: str = "default"
    shared_root: str | None = None
    gpu: str | None = None
    gpu_request: str = "gpus-per-node"
    network_interface: str | None = None
    network_gbits: float | None = None
    signal: str = "USR1"
    signal_lead_s: int = 300
    node_paths: tuple[str, ...] = ()
    job_setup: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    resources: dict[str, Any] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        """The folder that login and compute nodes share."""
        return paths.shared_root(self.shared_root)


def load(name: str | None = None) -> Cluster:
    """Return the named cluster's settings, else COOKBOOK_CLUSTER's, else default.yaml's, else none.

    RecipeFault lists every fault of the file.
    """
    chosen = name or os.environ.get("COOKBOOK_CLUSTER") or "default"
    if not NAME.match(chosen):
        raise RecipeFault(f"the cluster name {chosen!r} may hold only {NAME_RULE}")
    path = paths.CLUSTERS / f"{chosen}.yaml"
    if not path.is_file():
        if chosen == "default":
            return Cluster()
        known = sorted(file.stem for file in paths.CLUSTERS.glob("*.yaml"))
        raise RecipeFault(
            f"there is no cluster file {path}{nearest(chosen, known)}: copy "
            f"{paths.CLUSTERS / 'example.yaml'} to it"
        )
    config = yamlfile.load(path)
    faults = faults_in(config, _KEYS, "", str(path), "sft") + _own_faults(config, str(path))
    if faults:
        raise RecipeFault(faults)
    values = {key: value for key, value in config.items() if value is not None}
    values.pop("description", None)
    for key in ("job_setup", "node_paths"):
        values[key] = tuple(values.get(key, ()))
    values["environment"] = {
        key: str(value) for key, value in values.get("environment", {}).items()
    }
    return Cluster(name=chosen, **values)


def _own_faults(config: dict[str, Any], origin: str) -> list[str]:
    faults = []
    request = config.get("gpu_request") or GPU_REQUESTS[0]
    if request not in GPU_REQUESTS:
        faults.append(
            f"gpu_request must be one of {', '.join(GPU_REQUESTS)}, got {request!r}, in {origin}"
        )
    network = config.get("network_gbits")
    if isinstance(network, (int, float)) and network <= 0:
        faults.append(f"network_gbits must be more than 0, got {network}, in {origin}")
    gpu = config.get("gpu")
    if gpu is not None:
        known = yamlfile.load(paths.GPUS)
        if gpu not in known:
            faults.append(
                f"gpu must be one of {', '.join(known)} (configs/gpus.yaml), got {gpu!r}, "
                f"in {origin}"
            )
    resources = config.get("resources")
    if isinstance(resources, dict):
        faults += faults_in(resources, RESOURCES, "resources.", origin, "sft")
    for path in config.get("node_paths") or []:
        if not isinstance(path, str) or not path.startswith("/"):
            faults.append(f"node_paths holds whole paths, which begin with /, got {path!r}")
    for line in config.get("job_setup") or []:
        if not isinstance(line, str) or not line.isprintable():
            faults.append(f"job_setup holds shell lines, one item each, got {line!r}, in {origin}")
    faults += environment_faults(config.get("environment"), "environment", origin)
    return faults
