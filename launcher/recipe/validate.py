"""What is wrong with a recipe's values: their kinds, variables, secrets and arguments."""

from collections.abc import Iterator, Mapping
from typing import Any

from launcher.recipe import absent
from launcher.recipe.environment import (
    VARIABLE,
    environment_faults,
    owned_fault,
    variable_faults,
)
from launcher.recipe.model import Entry
from runspec.keys.key import Fault
from runspec.keys.key import faults as key_faults
from runspec.variables import owned_variables


def faults(config: Mapping[str, Any], entry: Entry) -> Iterator[Fault]:
    """Yield all faults of a resolved recipe.

    A recipe of torchtune's may hold keys of its own; torchtune checks them.
    """
    known = entry.keys
    unknown = sorted(config.keys() - known)
    missing = {key: absent.KEYS[key] for key in unknown if key in absent.KEYS}
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


def _rollout_faults(resources: Any, entry: Entry) -> Iterator[Fault]:
    """Yield what rollout nodes do not go together with."""
    key, given = "resources.rollout", resources if isinstance(resources, dict) else {}
    samples_answers = entry.method is not None and entry.method.samples_answers
    if given.get("rollout") and not samples_answers:
        yield Fault(key, f"{key}: this entry generates no answers; leave it out")


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
            yield Fault("secrets", owned_fault("secrets", name))
        is_path = path is None or (isinstance(path, str) and path.isprintable())
        if not VARIABLE.match(str(name)) or not is_path:
            yield Fault(
                "secrets",
                f"secrets contains {name!r}: {path!r}, which is not a valid variable name with the "
                "path of a file",
            )
