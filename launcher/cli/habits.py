"""Commands of other tools that are typed out of habit: one line each that leads on."""

import shlex
from collections.abc import Callable, Sequence
from functools import partial

from launcher.recipe import absent

_CONFIGS = (".yaml", ".yml")
_GPUS = "--nodes 1 --gpus-per-node 8"
Words = Sequence[str]


def line(words: Words) -> str:
    """Return what to type in place of another tool's command, "" if it is not known."""
    way = _WAYS.get(words[0])
    return f"{words[0]} is no command of cookbook: {way(words[1:])}" if way else ""


def _named(words: Words, *suffixes: str) -> str:
    return next((word for word in words if word.endswith(suffixes)), "")


def _train(words: Words) -> str:
    if file := _named(words, *_CONFIGS):
        return f"cookbook submit {shlex.quote(file)}"
    return "cookbook start DATA MODEL writes a recipe, and cookbook submit RECIPE starts it"


def _script(words: Words) -> str:
    file = next(filter(absent.file, words), "FILE.py")
    return absent.file(file)


def _batch(words: Words) -> str:
    if not words:
        return "cookbook submit RECIPE writes the job script and submits it; --dry-run prints it"
    return _script(words)


def _tune(words: Words) -> str:
    config = "llama3_1/8B_lora"
    if "--config" in words[:-1]:
        config = words[words.index("--config") + 1]
    return f"torchtune's configs are recipes: cookbook submit {shlex.quote(config)} {_GPUS}"


def _engine(prefix: str, words: Words) -> str:
    file = shlex.quote(_named(words, *_CONFIGS) or "FILE.yaml")
    program = f" entry={prefix}:{words[0]}" if prefix and words else ""
    return f"cookbook submit {file}{program} {_GPUS} (docs/engines.md)"


_WAYS: dict[str, Callable[[Words], str]] = {
    **dict.fromkeys(("train", "run"), _train),
    **dict.fromkeys(("sbatch", "srun"), _batch),
    **dict.fromkeys(("accelerate", "deepspeed", "python", "torchrun"), _script),
    "tune": _tune,
    "axolotl": partial(_engine, ""),
    "llamafactory-cli": partial(_engine, ""),
    "litgpt": partial(_engine, "litgpt"),
    "trl": partial(_engine, "trl"),
}
