"""Training by a method: torchrun ... -m trainer.train METHOD <run>/train.yaml

METHOD is the name of one of the trainer's (runspec/keys/methods.py), such as sft, or MODULE:CLASS
of a config class, such as a plug-in's.
"""

import sys
from pathlib import Path

from runspec.keys.methods import config_class
from trainer import start
from trainer.methods.base import named


def main(arguments: list[str]) -> int:
    """Train; exit status 0, 1, 2 for wrong usage, 65 for no finite loss.

    Args:
        arguments: a method, and the path of train.yaml.
    """
    if len(arguments) != 2:
        print("usage: python -m trainer.train METHOD <run>/train.yaml", file=sys.stderr)
        return 2
    try:
        method = config_class(arguments[0])
    except LookupError as error:
        print(error.args[0], file=sys.stderr)
        return 2
    return start.main(Path(arguments[1]), named(method.objective))


if __name__ == "__main__":
    start.leave(main(sys.argv[1:]))
