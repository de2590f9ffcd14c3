"""Scores answers, one at a time, for a rank: python -m plugins.rl.rewards.worker DESCRIPTOR

It gets the rewards of a recipe, then (name, prompt, completion, tokens, row), over the connection
of that file descriptor, and answers each with (score, None) or (None, what went wrong).
"""

import importlib
import importlib.util
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from plugins.rl.recipe_keys import BUILT_IN
from plugins.rl.rewards import builtin
from runspec.processes import end_with_parent


def loaded(block: Mapping[str, Any]) -> Callable[..., Any]:
    """What scores an answer as a block of `rewards` says.

    Raises:
        Exception: whatever the user's module raises; ImportError, AttributeError without it.
    """
    name = str(block["function"])
    if name in BUILT_IN:
        arguments = {k: v for k, v in block.items() if k not in ("function", "weight")}
        own = builtin.made(name, arguments)
        return lambda prompt, completion, tokens, row: as_score(own(completion, row))
    function = _of_user(name)
    parameters = inspect.signature(function).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())

    def score(
        prompt: str, completion: str, tokens: list[int], row: Mapping[str, Any]
    ) -> float | None:
        given = {key: [value] for key, value in row.items()}
        given |= {"prompts": [prompt], "completions": [completion], "completion_ids": [tokens]}
        scores = function(**{k: v for k, v in given.items() if takes_all or k in parameters})
        return as_score(scores[0])

    return score


def _of_user(name: str) -> Callable[..., Any]:
    where, _, attribute = name.rpartition(":")
    if where.endswith(".py"):
        path = Path(where)
        spec = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise AttributeError(f"{where} has no function {attribute}")
    return function


def as_score(value: Any) -> float | None:
    """A score as a number; None stays None. TypeError or ValueError for anything else."""
    if value is None:
        return None
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the score is {number}, which is no finite number")
    return number


def described(error: BaseException, name: str) -> str:
    """An exception in one line, with the file and line of the user's code if it was there."""
    where = name.rpartition(":")[0]
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: SyntaxError: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if where and each.filename.endswith(where)]
    place = f"{where}: " if where.endswith(".py") else ""
    if own:
        place = f"{own[-1].filename}:{own[-1].lineno}: "
    message = (str(error).splitlines() or [""])[0]
    return f"{place}{type(error).__name__}: {message}"


def main(arguments: list[str]) -> int:
    """Answer until the rank is gone."""
    # Not even a function that hangs outlives the rank.
    parent = os.getppid()
    end_with_parent()
    if os.getppid() != parent:
        return 0
    connection = Connection(int(arguments[0]))
    try:
        blocks, scorers = connection.recv(), {}
        for name, block in blocks.items():
            try:
                scorers[name] = loaded(block)
            except BaseException as error:
                connection.send(f"{name}: {described(error, str(block['function']))}")
                return 1
        connection.send(None)
        while True:
            name, *asked = connection.recv()
            try:
                connection.send((scorers[name](*asked), None))
            except Exception as error:
                connection.send((None, described(error, str(blocks[name]["function"]))))
    except (EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
