"""What a method reads of each sample that a dataset gives, and what lies together in a batch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SampleForm:
    """The documents of a sample, and a number that may go with it.

    A dataset's component turns a record, whose columns it names, into a sample: a mapping. The
    documents of a sample are never apart: they are neighbours in a packed row, else rows of the
    same batch.

    documents: for each document, the keys of its tokens and of its labels. number: the key of a
        sample's number, such as a label or a margin; "" if there is none. preferences: the
        component that reads the pairs of a set that cookbook prepare made; "" refuses such a set.
    """

    documents: tuple[tuple[str, str], ...] = (("tokens", "labels"),)
    number: str = ""
    preferences: str = ""

    @property
    def count(self) -> int:
        """Documents in a sample."""
        return len(self.documents)

    def limit(self, block: Mapping[str, Any], max_seq_len: int | None) -> int | None:
        """Tokens at which a document is cut: in a packed row there is room for all of a sample.

        Args:
            block: the dataset's.
            max_seq_len: the tokenizer's; None cuts nothing.
        """
        if max_seq_len is None or not block.get("packed"):
            return max_seq_len
        return max(1, max_seq_len // self.count)


# One document per sample, by the names that torchtune's datasets have.
SINGLE = SampleForm()
