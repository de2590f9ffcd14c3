"""The trainer with an export in files of 60 kB, of which several ranks write some."""

from trainer import train
from trainer.checkpoint import export


def main(arguments: list[str]) -> int:
    export.MAX_SHARD_BYTES = 60_000
    return train.main(["sft", *arguments])
