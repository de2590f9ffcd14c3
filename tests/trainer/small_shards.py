"""trainer.sft with an export in files of 60 kB, of which several ranks write some."""

from trainer import sft
from trainer.storage import export


def main(arguments: list[str]) -> int:
    export.MAX_SHARD_BYTES = 60_000
    return sft.main(arguments)
