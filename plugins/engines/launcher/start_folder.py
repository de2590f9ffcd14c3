"""The folder in which another trainer starts: the relative paths of its config count from there.

Its users type its command in the tool's checkout, or in a folder of their own, and name the config.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from plugins.engines.launcher.engine import Engine

_FILE = re.compile(
    r"(?:\.{1,2}/)*\w[\w.-]*(?:/[\w.-]+)*\.(?:csv|jinja|jsonl?|parquet|ya?ml)|\.{1,2}/\S+"
)
# What a key of these words names is written, or is the hub's.
_WRITTEN = re.compile(
    r"(?:^|_)(?:cache|export|hub|log|logging|mlflow|offload|out|output|prepared|saves?|wandb)(?:_|$)"
)
_KINDS = ("csv", "json", "parquet", "text")


def named(content: Mapping[str, Any], engine: Engine) -> dict[str, str]:
    """Return the relative paths that an engine's config names for reading, by dotted key."""
    found = {**dict(_files(content, "")), **engine.reads(content)}
    # The kit gives the values of an engine's own keys.
    return {key: path for key, path in found.items() if key not in engine.own}


def _files(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, list):
        for number, each in enumerate(value):
            yield from _files(each, f"{key}.{number}")
    elif isinstance(value, Mapping):
        for name, each in value.items():
            # Files of a dataset of the hub lie there.
            of_hub = name == "data_files" and value.get("path") not in (None, *_KINDS)
            if not of_hub and not _WRITTEN.search(str(name)):
                yield from _files(each, f"{key}.{name}".lstrip("."))
    elif isinstance(value, str) and _FILE.fullmatch(value):
        yield key, value


def missing(folder: Path, names: Mapping[str, str]) -> list[str]:
    """Return the keys whose paths lead nowhere from a folder."""
    return [key for key, name in names.items() if not os.path.exists(folder / name)]


def find(content: Mapping[str, Any], engine: Engine, file: Path) -> Path:
    """Return where an engine starts with a config file, if nobody says it.

    It is the nearest folder, from the config's upwards, else the shell's, in which most of these
    paths exist.
    """
    names = named(content, engine)
    return min([*file.parents, Path.cwd()], key=lambda place: len(missing(place, names)))
