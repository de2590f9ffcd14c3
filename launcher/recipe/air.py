"""A workload of Databricks' air CLI, read as a recipe whose entry is `command`.

Its fields: https://docs.databricks.com/aws/en/machine-learning/ai-runtime/cli/yaml-config. What
cannot mean the same on a Slurm cluster is refused by name.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher import venv
from launcher.errors import RecipeFault, nearest

# Two of these make a file a workload, also if a key that it needs is missing.
_MARKS = {"command", "compute", "code_source", "env_variables", "experiment_name"}
_KNOWN = _MARKS | {
    "environment",
    "secrets",
    "max_retries",
    "timeout_minutes",
    "parameters",
}
_BLOCKS = ("compute", "environment", "code_source", "env_variables", "secrets", "parameters")
_TYPE = re.compile(r"GPU_(\d+)x(\w+)")
# What Databricks' base environments bring to each workload.
_BASE = ("torch", "mlflow", "PyYAML")
# What stays beside the workload in the same file: the kit's own keys.
_OWN = {"resources", "tracking", "max_gpu_hours", "notify", "share", "stop_signal", "description"}


def is_workload(config: Mapping[str, Any]) -> bool:
    """Whether a YAML file is a workload of air's."""
    return "entry" not in config and len(config.keys() & _MARKS) > 1


def recipe(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the recipe that a workload means; RecipeFault lists all that it cannot mean here."""
    faults = [f"{each}, in {path}" for each in _faults(config, path.parent)]
    if faults:
        raise RecipeFault(faults)
    count, per_node = _accelerators(config["compute"])
    name = str(config.get("experiment_name") or path.stem)
    given = config.get("resources") or {}
    own = {key: config[key] for key in _OWN & config.keys()}
    return {
        "description": f"workload of air: {name}{_unused(config)}",
        **own,
        "entry": "command",
        "command": str(config["command"]),
        "code_root": _root(config.get("code_source") or {}) or ".",
        "parameters": dict(config.get("parameters") or {}),
        "env": {"MLFLOW_EXPERIMENT_NAME": name, **_texts(config.get("env_variables") or {})},
        **({"environment": {"dependencies": list(wanted)}} if (wanted := _wanted(config)) else {}),
        "secrets": {
            variable: f"~/.config/slurm-cookbook/secrets/{place}"
            for variable, place in (config.get("secrets") or {}).items()
        },
        "max_retries": int(config.get("max_retries") or 0),
        **({"timeout": str(minutes)} if (minutes := config.get("timeout_minutes")) else {}),
        "resources": {"nodes": count // per_node, "gpus_per_node": per_node, **given},
    }


def _unused(config: Mapping[str, Any]) -> str:
    if "version" not in (config.get("environment") or {}):
        return ""
    return " (environment.version is not used: see docs/engines.md)"


def _accelerators(compute: Mapping[str, Any]) -> tuple[int, int]:
    kind, count = (
        _TYPE.fullmatch(str(compute.get("accelerator_type"))),
        compute.get("num_accelerators"),
    )
    return count if type(count) is int else 0, int(kind[1]) if kind else 0


def _root(source: Mapping[str, Any]) -> str | None:
    """Return the folder of a code_source, in its older form and its newer one."""
    snapshot = source.get("snapshot") or source
    return snapshot.get("root_path") if isinstance(snapshot, Mapping) else None


def _texts(variables: Mapping[str, Any]) -> dict[str, str]:
    return {str(name): str(value) for name, value in variables.items()}


def _faults(config: Mapping[str, Any], place: Path) -> Iterator[str]:
    for key in sorted(map(str, config.keys() - _KNOWN - _OWN)):
        if near := nearest(key, _KNOWN):
            yield f"{key}: unknown key{near}"
        else:
            yield f"{key}: this key of air's has no meaning on a Slurm cluster: leave it out"
    blocks = [key for key in _BLOCKS if not isinstance(config.get(key) or {}, Mapping)]
    for key in blocks:
        yield f"{key} must be a block of keys and values, got {config[key]!r}"
    if blocks:
        return
    compute = config.get("compute") or {}
    count, per_node = _accelerators(compute)
    if not compute:
        yield "compute is missing: it needs num_accelerators and accelerator_type"
    elif not per_node:
        given = compute.get("accelerator_type")
        yield f"compute.accelerator_type must be such as GPU_8xH100 or GPU_1xA10, got {given!r}"
    elif count < 1 or count % per_node:
        given = compute.get("num_accelerators")
        yield (
            f"compute.num_accelerators must be a multiple of {per_node}, the GPUs of a node of "
            f"{compute.get('accelerator_type')}, got {given!r}"
        )
    for key in sorted(compute.keys() - {"num_accelerators", "accelerator_type"}):
        near = nearest(key, ("num_accelerators", "accelerator_type"))
        remedy = "Slurm has no such pool: use resources.partition, qos or account"
        yield f"compute.{key}: {f'unknown key{near}' if near else remedy}"
    for key, least in (("max_retries", 0), ("timeout_minutes", 1)):
        number = config.get(key)
        if number is not None and (type(number) is not int or number < least):
            yield f"{key} must be a number of {least} or more, got {number!r}"
    if not str(config.get("command") or "").strip():
        yield "command is missing: it needs the shell lines that each node runs"
    yield from _source_faults(config.get("code_source") or {}, place)
    yield from _environment_faults(config.get("environment") or {})
    for variable, place in (config.get("secrets") or {}).items():
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(place)):
            yield f"secrets.{variable} must be scope/key, got {place!r}"


def _source_faults(source: Mapping[str, Any], place: Path) -> Iterator[str]:
    inner = source.get("snapshot") or {}
    if not isinstance(inner, Mapping):
        yield f"code_source.snapshot must be a block with root_path, got {inner!r}"
        return
    for block, keys, known in (
        ("code_source", source.keys(), {"type", "snapshot", "root_path"}),
        ("code_source.snapshot", inner.keys(), {"root_path"}),
    ):
        for key in sorted(keys - known):
            yield f"{block}.{key}: only the folder as it is can be copied: check out the commit"
    if source.get("type", "snapshot") != "snapshot":
        yield f"code_source.type must be snapshot, got {source['type']!r}"
    root = _root(source)
    if source and not root:
        yield "code_source has no root_path"
    elif root and not (place / Path(root).expanduser()).is_dir():
        yield f"code_source.snapshot.root_path: {root} is no folder: its path counts from {place}"


def _environment_faults(environment: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted(environment.keys() - {"dependencies", "version"}):
        yield f"environment.{key}: Databricks' images do not exist here: use dependencies"
    wanted = environment.get("dependencies") or []
    if not isinstance(wanted, list):
        yield f"environment.dependencies must be a list of packages here, got {wanted!r}"


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
