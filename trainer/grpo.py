"""Reinforcement learning: torchrun ... -m trainer.grpo <run>/train.yaml"""

import sys

from trainer import start
from trainer.objectives.grpo import PolicyOptimisation


def main(arguments: list[str]) -> int:
    """Train by the given train.yaml; exit status 0, 1, 2 for wrong usage, 65 for no finite loss."""
    return start.main(arguments, PolicyOptimisation)


if __name__ == "__main__":
    start.leave(main(sys.argv[1:]))
