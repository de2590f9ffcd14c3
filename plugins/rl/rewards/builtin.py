"""The kit's own reward functions; each is made of a recipe's keys and scores one answer.

`code` limits what a program takes; it is no sandbox: see `run_program`.
"""

import ctypes
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from typing import Any

from plugins.evaluate.scores import fits_schema
from runspec.processes import end_with_parent

Function = Callable[[str, Mapping[str, Any]], float | None]

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_FENCED = re.compile(r"```[a-zA-Z]*\n(.*?)```", re.DOTALL)
# Of a program: bytes of a file that it writes, open files, and what it may print.
_FILE_BYTES, _OPEN_FILES = 10 * 2**20, 64
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


def made(name: str, arguments: Mapping[str, Any]) -> Function:
    """The reward function of this name; ValueError if its keys are wrong."""
    return _MAKERS[name](**arguments)


def final_answer(text: str) -> str:
    """The answer that a text ends with: in the last \\boxed{}, after the last ####, or a number.

    The whole text if it has none of these.
    """
    if (at := text.rfind("\\boxed{")) >= 0:
        depth, begin = 0, at + len("\\boxed{")
        for end in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth < 0:
                return text[begin:end]
    if "####" in text:
        return text.rpartition("####")[2]
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else text


def same(first: str, second: str) -> bool:
    """Whether two answers are equal: as numbers, else as texts without case and outer signs."""
    texts = [text.strip().strip("$. ").lower() for text in (first, second)]
    try:
        numbers = [Decimal(text.replace(",", "")) for text in texts]
        return numbers[0] == numbers[1]
    except InvalidOperation:
        return texts[0] == texts[1]


def _exact_match(column: str = "answer", pattern: str | None = None) -> Function:
    compiled = None if pattern is None else re.compile(pattern, re.DOTALL)

    def answer_of(text: str) -> str | None:
        if compiled is None:
            return final_answer(text)
        matches = list(compiled.finditer(text))
        return matches[-1].group(1 if compiled.groups else 0) if matches else None

    def score(completion: str, row: Mapping[str, Any]) -> float | None:
        given = answer_of(completion)
        wanted = final_answer(str(row[column])) if row[column] is not None else None
        if wanted is None:
            return None
        return float(given is not None and same(given, wanted))

    return score


def _regex(pattern: str) -> Function:
    compiled = re.compile(pattern, re.DOTALL)
    return lambda completion, row: float(compiled.search(completion) is not None)


def _json_schema(schema: Any = None, column: str | None = None) -> Function:
    if (schema is None) == (column is None):
        raise ValueError("give either schema or column")

    def score(completion: str, row: Mapping[str, Any]) -> float | None:
        wanted = row[column] if column is not None else schema
        return fits_schema(completion, wanted if isinstance(wanted, str) else json.dumps(wanted))

    return score


def _last_block(text: str) -> str:
    """The last fenced block of a text; the text if it has none."""
    blocks = _FENCED.findall(text)
    return str(blocks[-1]) if blocks else text


def _code(
    column: str = "tests", seconds: float = 10, memory_mb: int = 512, network: bool = False
) -> Function:
    def score(completion: str, row: Mapping[str, Any]) -> float | None:
        program = f"{_last_block(completion)}\n\n{row[column]}\n"
        return float(run_program(program, seconds, memory_mb, network))

    return score


def run_program(program: str, seconds: float, memory_mb: int, network: bool = False) -> bool:
    """Whether a Python program ends with status 0 within its limits.

    Limited are its time, its memory, the size of each file that it writes, its open files, and the
    network, of which it sees none. Not limited: it may read, write and delete every file that its
    user may, start processes (those that leave its process group outlive it until the job ends),
    and fill the disk with many files. It is for the code of a model that makes mistakes, not for
    code of someone who means harm: for that, run the job in a container without your files.

    Raises:
        PermissionError: the node does not let a process give up the network.
    """

    def limit() -> None:
        end_with_parent()
        if not network and _LIBC.unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
            raise PermissionError
        cpu, memory = int(seconds) + 1, memory_mb * 2**20
        for which, most in (
            (resource.RLIMIT_CPU, cpu),
            (resource.RLIMIT_AS, memory),
            (resource.RLIMIT_FSIZE, _FILE_BYTES),
            (resource.RLIMIT_NOFILE, _OPEN_FILES),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(which, (most, most))

    with tempfile.TemporaryDirectory(prefix="reward-", ignore_cleanup_errors=True) as folder:
        environment = {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"}
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", program],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=limit,
            )
        except subprocess.SubprocessError:
            raise PermissionError(
                "this node does not let a process give up the network (user namespaces are off); "
                "set network: true in the reward to run programs with it"
            ) from None
        except (OSError, ValueError):
            return False  # such as a null byte, or a program that is too long for an argument
        try:
            return process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            # What it started is in its group, unless it left it.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


_MAKERS: dict[str, Callable[..., Function]] = {
    "exact_match": _exact_match,
    "regex": _regex,
    "json_schema": _json_schema,
    "code": _code,
}
