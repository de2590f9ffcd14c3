"""What of datasets would end a run, or make its figures say nothing."""

import numpy as np

from trainer.data.tokenised import TokenisedDataset
from trainer.errors import ConfigError
from trainer.parallel.world import World

ALL_SHARED = (
    "dataset_val: each of its samples is in dataset too; take them apart, such as "
    "dataset.split=train[:95%] dataset_val.split=train[95%:]"
)


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


def overlap(world: World, training: TokenisedDataset, validation: TokenisedDataset) -> None:
    """A validation loss over samples that are trained on says nothing."""
    equal = int(np.isin(validation.fingerprints, training.fingerprints).sum())
    if equal == len(validation):
        raise ConfigError(ALL_SHARED)
    if equal:
        world.say(
            f"note: dataset_val: {equal:,} of {len(validation):,} samples are the same as "
            "samples of dataset"
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
