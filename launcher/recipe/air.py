"""A workload of Databricks' air CLI, read as a recipe whose entry is `command`.

Its fields: https://docs.databricks.com/aws/en/machine-learning/ai-runtime/cli/yaml-config. What
cannot mean the same on a Slurm cluster is refused by name.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher import venv
from launcher.errors import RecipeFault
from runspec.keys.key import REQUIRED, Key, faults, table

# Two of these make a file a workload, also if a key that it needs is missing.
_MARKS = {"command", "compute", "code_source", "env_variables", "experiment_name"}
_KEYS = table(
    Key("experiment_name", "text", "The run's name."),
    Key("command", "any", "Shell lines that each node runs.", REQUIRED),
    Key("compute", "block", "What it runs on.", REQUIRED),
    Key("compute.num_accelerators", "positive", "GPUs in all.", REQUIRED),
    Key("compute.accelerator_type", "text", "Such as GPU_8xH100.", REQUIRED),
    Key("environment", "block", "What it runs in."),
    Key("environment.version", "any", "Of Databricks' images; not used."),
    Key("environment.dependencies", "texts", "Packages."),
    Key("code_source", "block", "What is copied into the run."),
    Key("code_source.type", "text", "snapshot."),
    Key("code_source.root_path", "text", "Its folder, in the older form."),
    Key("code_source.snapshot", "block", "The newer form."),
    Key("code_source.snapshot.root_path", "text", "Its folder."),
    Key("env_variables", "open block", "Environment variables."),
    Key("secrets", "open block", "scope/key by the name of a variable."),
    Key("max_retries", "count", "Retries of a failed attempt."),
    Key("timeout_minutes", "positive", "Limit of an attempt."),
    Key("parameters", "open block", "Hyperparameters."),
)
# What to do about a key of air's that cannot mean the same on a Slurm cluster, by its block.
_REMEDIES = {
    "": "this key of air's has no meaning on a Slurm cluster: leave it out",
    "compute": "Slurm has no such pool: use resources.partition, qos or account",
    "environment": "Databricks' images do not exist here: use dependencies",
    "code_source": "only the folder as it is can be copied: check out the commit",
    "code_source.snapshot": "only the folder as it is can be copied: check out the commit",
}
_TYPE = re.compile(r"GPU_(\d+)x(\w+)")
# What Databricks' base environments bring to each workload.
_BASE = ("torch", "mlflow", "PyYAML")
# What stays beside the workload in the same file: the kit's own keys.
_OWN = {"resources", "tracking", "notify", "share", "stop_signal", "description"}


def is_workload(config: Mapping[str, Any]) -> bool:
    """Whether a YAML file is a workload of air's."""
    return "entry" not in config and len(config.keys() & _MARKS) > 1


def recipe(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the recipe that a workload means; RecipeFault lists all that it cannot mean here."""
    faults = [f"{each}, in {path}" for each in _faults(config, path.parent)]
    if faults:
        raise RecipeFault(faults)
    count, per_node = _accelerators(config["compute"])
    version = (config.get("environment") or {}).get("version") is not None
    unused = " (environment.version is not used: see docs/engines.md)" * version
    name = str(config.get("experiment_name") or path.stem)
    given = config.get("resources") or {}
    minutes = config.get("timeout_minutes")
    limit = {"time": str(minutes)} if minutes else {}
    own = {key: config[key] for key in _OWN & config.keys()}
    return {
        "description": f"workload of air: {name}{unused}",
        **own,
        "entry": "command",
        "command": str(config["command"]),
        "code_root": _root(config.get("code_source") or {}) or ".",
        "parameters": dict(config.get("parameters") or {}),
        "env": {"MLFLOW_EXPERIMENT_NAME": name, **_texts(config.get("env_variables"))},
        **({"environment": {"dependencies": list(wanted)}} if (wanted := _wanted(config)) else {}),
        "secrets": {
            variable: f"~/.config/slurm-cookbook/secrets/{place}"
            for variable, place in (config.get("secrets") or {}).items()
        },
        "max_retries": int(config.get("max_retries") or 0),
        "resources": {"nodes": count // per_node, "gpus_per_node": per_node, **limit, **given},
    }


def _accelerators(compute: Mapping[str, Any]) -> tuple[int, int]:
    kind = _TYPE.fullmatch(str(compute.get("accelerator_type")))
    return int(compute["num_accelerators"]), int(kind[1]) if kind else 0


def _root(source: Mapping[str, Any]) -> str | None:
    """Return the folder of a code_source, in its older form and its newer one."""
    return (source.get("snapshot") or source).get("root_path")


def _texts(variables: Mapping[str, Any] | None) -> dict[str, str]:
    return {str(name): str(value) for name, value in (variables or {}).items()}


def _faults(config: Mapping[str, Any], place: Path) -> Iterator[str]:
    found = [*faults({k: v for k, v in config.items() if k not in _OWN}, _KEYS)]
    for key, text in found:
        unknown = text.startswith("unknown key") and "(did you mean" not in text
        yield f"{key}: {_REMEDIES[key.rpartition('.')[0]]}" if unknown else text
    wrong = {key for key, _ in found}
    if not wrong & {"compute", "compute.num_accelerators", "compute.accelerator_type"}:
        count, per_node = _accelerators(config["compute"])
        kind = config["compute"]["accelerator_type"]
        if not per_node:
            yield f"compute.accelerator_type must be such as GPU_8xH100 or GPU_1xA10, got {kind!r}"
        elif count % per_node:
            yield (
                f"compute.num_accelerators must be a multiple of {per_node}, the GPUs of a node of "
                f"{kind}, got {count}"
            )
    if not wrong & {"code_source", "code_source.snapshot"}:
        yield from _source_faults(config.get("code_source") or {}, place)
    for variable, name in ({} if "secrets" in wrong else config.get("secrets") or {}).items():
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)):
            yield f"secrets.{variable} must be scope/key, got {name!r}"


def _source_faults(source: Mapping[str, Any], place: Path) -> Iterator[str]:
    root = _root(source)
    if source.get("type", "snapshot") != "snapshot":
        yield f"code_source.type must be snapshot, got {source['type']!r}"
    if source and not root:
        yield "code_source has no root_path"
    elif root and not (place / Path(str(root)).expanduser()).is_dir():
        yield f"code_source.snapshot.root_path: {root} is no folder: its path counts from {place}"


def _wanted(config: Mapping[str, Any]) -> list[str]:
    """Return what to build an environment of; nothing if the kit's own meets all dependencies."""
    wanted = [str(each) for each in (config.get("environment") or {}).get("dependencies") or []]
    if all(map(_met, wanted)):
        return []
    names = set(map(venv.required, wanted))
    return [*wanted, *(name for name in _BASE if venv.plain_name(name) not in names)]


def _met(dependency: str) -> bool:
    """Whether the kit's virtual environment has a package, in a version that is asked for."""
    # Imported late, as few recipes are workloads.
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        asked = Requirement(dependency)
    except InvalidRequirement:
        return False
    installed = {venv.plain_name(name): version for name, version in venv.packages().items()}
    version = installed.get(venv.plain_name(asked.name))
    plain = not asked.extras and asked.url is None and version is not None
    return plain and asked.specifier.contains(str(version), prereleases=True)
