"""Runs a module that answers one question, and ends at once: python -m trainer.once check FILE ...

Most of such a process's time is that of imports. Without a search for garbage among what they make,
and without taking the interpreter down at the end, it takes about two thirds: 3.5 s of CPU time,
not 5.4 s, for a check of a model of transformers (means of three, 2026-11-24).
"""

import gc
import importlib
import os
import sys

# Objects between two searches; Python's own number is 700.
_RARELY = 100_000


def main(arguments: list[str]) -> int:
    """Call main() of a module of trainer/ with the arguments after its name."""
    gc.set_threshold(_RARELY)
    module = importlib.import_module(f"trainer.{arguments[0]}")
    return int(module.main(arguments[1:]))


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
