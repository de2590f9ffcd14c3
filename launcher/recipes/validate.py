"""What is wrong with a recipe's values: their kinds, variables, secrets and arguments."""

import re
from collections.abc import Iterator, Mapping, Set
from typing import Any

from launcher.recipes.entries import Entry
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
    yield from variable_faults(config.get("env"), "env")
    yield from _secrets_faults(config.get("secrets"))
    arguments = config.get("args")
    for argument in arguments if entry.own_code and isinstance(arguments, list) else []:
        if isinstance(argument, (dict, list)) or not str(argument).isprintable():
            yield Fault("args", f"args contains {argument!r}, which is not one line of text")


def _absent(unknown: Set[str]) -> dict[str, str]:
    """Return why this version has not what keys ask for, by the key."""
    if not unknown:
        return {}
    from launcher.recipes import absent  # most recipes have no unknown key

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
    named = dict.fromkeys(map(str, secrets)) if isinstance(secrets, list) else secrets
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
                f"secrets holds {name!r}: {path!r}, which is not a valid variable name with the "
                "path of a file",
            )


def _owned(key: str, name: Any) -> str:
    return f"{key} sets {name}, which the job script, Slurm or torchrun sets: choose another name"
