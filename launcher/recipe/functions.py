"""Functions in files of the user's own: found from where they are named, and copied into a run."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.errors import PreflightFault
from runspec.keys.train import TrainConfig

Method = type[TrainConfig] | None


def use_whole_paths(config: dict[str, Any], method: Method, folder: Path) -> None:
    """Let a relative path count from the shell's folder, if there is such a file, else from
    the recipe's: a job runs in another one.
    """
    for keys, path, function in _files(config, method):
        whole = path if path.is_file() else folder / path
        _put(config, keys, f"{whole.absolute()}:{function}")


def copied(configs: Sequence[dict[str, Any]], method: Method, run_dir: Path) -> dict[str, str]:
    """Let configs name the copies that a run keeps; return the text of each by its place in it.

    What is changed after the submission is not what runs. The file of rewards.mine.function is
    rewards/mine.py.

    Raises:
        PreflightFault: a file cannot be read.
    """
    copies: dict[str, str] = {}
    for config in configs:
        for keys, path, function in _files(config, method):
            place = f"{'/'.join(keys[:-1])}.py"
            try:
                copies[place] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                why = getattr(error, "strerror", None) or error
                raise PreflightFault(f"{'.'.join(keys[:-1])}: cannot read {path}: {why}") from None
            _put(config, keys, f"{run_dir / place}:{function}")
    return copies


def _files(
    config: Mapping[str, Any], method: Method
) -> Iterator[tuple[tuple[str, ...], Path, str]]:
    """Yield the key, file and function of each value that names a file."""
    for keys, value in method.functions(config).items() if method else ():
        where, _, function = value.rpartition(":")
        if where.endswith(".py"):
            yield keys, Path(where).expanduser(), function


def _put(block: dict[str, Any], keys: tuple[str, ...], value: str) -> None:
    """Set a key; blocks around it, which another config may share, are copied."""
    first, *rest = keys
    if rest:
        block[first] = dict(block[first])
        _put(block[first], tuple(rest), value)
    else:
        block[first] = value
