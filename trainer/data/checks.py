"""What of datasets would end a run, or make its figures say nothing."""

import numpy as np

from trainer.config import TrainConfig
from trainer.data.tokenised import TokenisedDataset
from trainer.errors import ConfigError
from trainer.parallel.world import World

_APART = "take them apart, such as dataset.split=train[:95%] dataset_val.split=train[95%:]"
ALL_SHARED = f"dataset_val: each of its samples is in dataset too; {_APART}"


def targets(key: str, samples: TokenisedDataset, world: World) -> None:
    """Refuse a dataset of which nothing is trained; say how many samples hold nothing to train."""
    empty = int((samples.targets == 0).sum())
    if empty == len(samples):
        raise ConfigError(
            f"{key}: no sample has a token to train on; "
            "check the answers' column and tokenizer.max_seq_len"
        )
    if empty:
        world.say(
            f"note: {key}: {empty:,} of {len(samples):,} samples hold no token to train on "
            "(no answer, or it begins after tokenizer.max_seq_len)"
        )


def overlap(
    config: TrainConfig, world: World, training: TokenisedDataset, validation: TokenisedDataset
) -> None:
    """A validation loss over samples that are trained on says nothing."""
    if fault := shared_splits(config, training.split_sizes):
        raise ConfigError(fault)
    equal = int(np.isin(validation.fingerprints, training.fingerprints).sum())
    if equal == len(validation):
        raise ConfigError(ALL_SHARED)
    if equal:
        world.say(
            f"note: dataset_val: {equal:,} of {len(validation):,} samples are the same as "
            "samples of dataset"
        )


def shared_splits(config: TrainConfig, sizes: dict[str, int]) -> str | None:
    """Say what splits of the same data have in common, None if nothing or if that is not known.

    Args:
        sizes: samples of each split, by its name.
    """
    alike = {"split": None, "packed": None}
    given = (config.dataset, config.dataset_val or {})
    if given[0] | alike != given[1] | alike:
        return None
    splits = [block.get("split", "train") for block in given]
    shared = _shared_samples(splits[0], splits[1], sizes)
    if not shared:
        return None
    return (
        f"dataset_val: shares {shared:,} samples with dataset (split {splits[1]} and {splits[0]}); "
        f"{_APART}"
    )


def _shared_samples(first: str, second: str, sizes: dict[str, int]) -> int:
    """How many samples two splits such as train[:90%] have in common; 0 if that is not known."""
    from datasets import ReadInstruction

    try:
        ranges = [ReadInstruction.from_spec(spec).to_absolute(sizes) for spec in (first, second)]
    except (ValueError, AssertionError):
        return 0
    return sum(
        max(0, min(a.to, b.to) - max(a.from_, b.from_))
        for a in ranges[0]
        for b in ranges[1]
        if a.splitname == b.splitname
    )


def misfits(
    key: str, samples: TokenisedDataset, row_length: int | None, vocab_size: int, max_seq_len: int
) -> list[str]:
    """The faults that samples would cause in a model with this vocabulary and context."""
    texts: list[str] = []
    lengths = samples.documents.max(1)
    longest = int(lengths.argmax())
    if row_length is not None and row_length > max_seq_len:
        texts.append(
            f"{key}.packed: rows of {row_length} tokens, the model takes {max_seq_len}; "
            f"set tokenizer.max_seq_len={max_seq_len}"
        )
    elif lengths[longest] > max_seq_len:
        texts.append(
            f"{key}: {int((lengths > max_seq_len).sum()):,} of {len(samples):,} samples "
            f"are too long: {samples.origin(longest)} has {lengths[longest]} tokens, "
            f"the model takes {max_seq_len}; set tokenizer.max_seq_len={max_seq_len}"
        )
    if samples.highest_token >= vocab_size:
        texts.append(
            f"tokenizer: it made token {samples.highest_token} of {key}'s "
            f"{samples.highest_origin}, the model knows {vocab_size} tokens; "
            "leave it out, or give the model's own tokenizer"
        )
    return texts
