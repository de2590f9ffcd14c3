"""Files of the user's reward functions: found from where they are named, and copied into a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.errors import PreflightFault

FOLDER = "rewards"  # in a run's directory


def files(config: Mapping[str, Any]) -> dict[str, Path]:
    """Return the files that functions of a recipe's `rewards` are in, by the reward's name."""
    blocks = config.get("rewards")
    paths = {}
    for name, block in blocks.items() if isinstance(blocks, dict) else ():
        function = block.get("function") if isinstance(block, dict) else None
        where = str(function).rpartition(":")[0]
        if where.endswith(".py"):
            paths[str(name)] = Path(where).expanduser()
    return paths


def use_whole_paths(config: dict[str, Any], folder: Path) -> None:
    """Let a relative path count from the shell's folder, if there is such a file, else from
    the recipe's: a job runs in another one.
    """
    for name, path in files(config).items():
        block = config["rewards"][name]
        function = str(block["function"]).rpartition(":")[2]
        whole = path if path.is_file() else folder / path
        config["rewards"][name] = {**block, "function": f"{whole.absolute()}:{function}"}


def copied(configs: Sequence[dict[str, Any]], run_dir: Path) -> dict[str, str]:
    """Let configs name the copies that a run keeps; return the text of each by its place in it.

    What is changed after the submission is not what runs.
    """
    copies: dict[str, str] = {}
    for config in configs:
        for name, path in files(config).items():
            place = f"{FOLDER}/{name}.py"
            try:
                copies[place] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                why = getattr(error, "strerror", None) or error
                raise PreflightFault(f"rewards.{name}: cannot read {path}: {why}") from None
            block = dict(config["rewards"][name])
            block["function"] = f"{run_dir / place}:{str(block['function']).rpartition(':')[2]}"
            config["rewards"] = {**config["rewards"], name: block}
    return copies
