"""Preference tuning on labelled answers: torchrun ... -m trainer.kto <run>/train.yaml"""

import sys

from trainer import start
from trainer.objectives.kto import UnpairedPreferenceTuning


def main(arguments: list[str]) -> int:
    """Train by the given train.yaml; exit status 0, 1, 2 for wrong usage, 65 for no finite loss."""
    return start.main(arguments, UnpairedPreferenceTuning)


if __name__ == "__main__":
    start.leave(main(sys.argv[1:]))
