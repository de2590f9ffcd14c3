"""Training by one of the kit's methods: torchrun ... -m trainer.train sft <run>/train.yaml"""

import sys

from runspec.keys.methods import METHODS
from trainer import start
from trainer.methods.base import named


def main(arguments: list[str]) -> int:
    """Train; exit status 0, 1, 2 for wrong usage, 65 for no finite loss.

    Args:
        arguments: the name of a method, and the path of train.yaml.
    """
    if len(arguments) != 2 or arguments[0] not in METHODS:
        names = "|".join(METHODS)
        print(f"usage: python -m trainer.train {names} <run>/train.yaml", file=sys.stderr)
        return 2
    return start.main(arguments[1:], named(METHODS[arguments[0]].objective))


if __name__ == "__main__":
    start.leave(main(sys.argv[1:]))
