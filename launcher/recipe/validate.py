"""What is wrong with a recipe's values: their kinds, variables, secrets and arguments."""

import re
from collections.abc import Iterator, Mapping, Set
from typing import Any

from launcher.recipe.entries import Entry
from runspec.keys.environment import CONTAINERS, ENVIRONMENT
from runspec.keys.key import Fault
from runspec.keys.key import faults as key_faults
from runspec.variables import owned_variables

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
# A job script is a file that others may read and Slurm keeps: no secret goes into it.
_SECRET = re.compile(r"TOKEN(?!IZ)|SECRET|PASSW|API_?KEY|CREDENTIAL", re.IGNORECASE)


def faults(config: Mapping[str, Any], entry: Entry) -> Iterator[Fault]:
    """Yield all faults of a resolved recipe.

    A recipe of torchtune's may hold keys of its own; torchtune checks them.
    """
    known = entry.keys
    missing = _absent(config.keys() - known)
    yield from (Fault(key, f"{key}: {why}") for key, why in missing.items())
    given = {key: value for key, value in config.items() if key not in missing}
    yield from key_faults(
        {key: value for key, value in given.items() if key in known or not entry.other_keys}, known
    )
    yield from entry.faults(config)
    yield from _rollout_faults(config.get("resources"), entry)
    yield from variable_faults(config.get("env"), "env")
    yield from environment_faults(config.get("environment"), "environment.")
    yield from _secrets_faults(config.get("secrets"))
    arguments = config.get("args")
    for argument in arguments if entry.own_code and isinstance(arguments, list) else []:
        if isinstance(argument, (dict, list)) or not str(argument).isprintable():
            yield Fault("args", f"args contains {argument!r}, which is not one line of text")


def environment_faults(given: Any, start: str = "") -> Iterator[Fault]:
    """Yield the faults of an environment's block that its table of keys does not see."""
    if not isinstance(given, dict):
        return
    yield from variable_faults(given.get("variables"), f"{start}variables")
    kind = given.get("kind") or "venv"
    if kind not in ENVIRONMENT["kind"].choices:
        return  # what belongs to it is not known
    container = kind in CONTAINERS
    for key, fits in (
        ("image", container),
        ("binds", container),
        ("options", container),
        ("conda", kind == "conda"),
        ("conda_root", kind == "conda"),
        ("dependencies", kind in ("venv", "modules")),
    ):
        if given.get(key) and not fits:
            yield Fault(f"{start}{key}", f"{start}{key} has no meaning for kind: {kind}")
    for key, needed in (("image", container), ("conda", kind == "conda")):
        if needed and not given.get(key):
            yield Fault(f"{start}{key}", f"{start}{key} is missing: kind: {kind} needs it")
    if given.get("python") and given.get("dependencies"):
        yield Fault(f"{start}python", f"{start}python and dependencies exclude each other")
    binds = given.get("binds")
    for bind in binds if isinstance(binds, list) else []:
        if not re.fullmatch(r"/[^:,\s]*(:/[^:,\s]*(:r[ow])?)?", str(bind)):
            yield Fault(
                f"{start}binds", f"{start}binds: {bind!r} is not /PATH, /SOURCE:/TARGET[:ro]"
            )


def _rollout_faults(resources: Any, entry: Entry) -> Iterator[Fault]:
    """Yield what rollout nodes do not go together with."""
    key, given = "resources.rollout", resources if isinstance(resources, dict) else {}
    if given.get("rollout") in (None, "same"):
        return
    if entry.method is None or not entry.method.samples_answers:
        yield Fault(key, f"{key}: this entry generates no answers; leave it out")
    if given.get("spare_nodes"):
        yield Fault(
            key, f"{key}: not with spare_nodes: a lost node requeues the job; leave one out"
        )


def _absent(unknown: Set[str]) -> dict[str, str]:
    """Return why this version has not what keys ask for, by the key."""
    if not unknown:
        return {}
    from launcher.recipe import absent  # most recipes have no unknown key

    return {key: absent.KEYS[key] for key in sorted(unknown) if key in absent.KEYS}


def variable_faults(variables: Any, key: str) -> Iterator[Fault]:
    """Yield the faults of a block of environment variables that goes into a job script."""
    for name, value in variables.items() if isinstance(variables, dict) else ():
        where = f"{key}.{name}"
        if not _VARIABLE.match(str(name)):
            yield Fault(where, f"{key} contains {name!r}, which is not a valid variable name")
        elif _SECRET.search(str(name)):
            yield Fault(
                where,
                f"{key} sets {name}, and others may read a job script: keep secrets out of it; "
                "name it under secrets: in a recipe; the hub's token is read from HF_TOKEN_PATH or "
                "its own login",
            )
        # srun's own variables are options that a site may need.
        elif owned_variables([name]) and not (key == "environment" and name.startswith("SRUN_")):
            yield Fault(where, _owned(key, name))
        elif value is None:
            yield Fault(
                where, f'{where} has no value: write {name}: "" to set it to an empty string'
            )
        elif isinstance(value, (dict, list)) or not str(value).isprintable():
            yield Fault(where, f"{where} must be one line of text, got {value!r}")


def _secrets_faults(secrets: Any) -> Iterator[Fault]:
    if secrets is None:
        return
    listed = isinstance(secrets, list) and all(isinstance(name, str) for name in secrets)
    named = dict.fromkeys(secrets) if listed else secrets
    if not isinstance(named, dict):
        yield Fault(
            "secrets",
            f"secrets must be a list of names, or names with paths of files, got {secrets!r}",
        )
        return
    for name, path in named.items():
        if owned_variables([name]):
            yield Fault("secrets", _owned("secrets", name))
        is_path = path is None or (isinstance(path, str) and path.isprintable())
        if not _VARIABLE.match(str(name)) or not is_path:
            yield Fault(
                "secrets",
                f"secrets contains {name!r}: {path!r}, which is not a valid variable name with the "
                "path of a file",
            )


def _owned(key: str, name: Any) -> str:
    return f"{key} sets {name}, which the job script, Slurm or torchrun sets: choose another name"
