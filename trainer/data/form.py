"""What a method reads of each sample of a dataset, and which documents share a batch."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SampleForm:
    """The documents of a sample, and a number that may go with it.

    A dataset's component turns a record, whose columns it names, into a sample: a mapping. The
    documents of a sample are never apart: they are neighbours in a packed row, else rows of the
    same batch.
    """

    # For each document, the keys of its tokens and of its labels.
    documents: tuple[tuple[str, str], ...] = (("tokens", "labels"),)
    # The key of a sample's number, such as a label or a margin; "" if there is none.
    number: str = ""
    # The component that reads the pairs of a set that cookbook prepare made; "" refuses such a set.
    preferences: str = ""

    @property
    def count(self) -> int:
        """Documents in a sample."""
        return len(self.documents)


def cut_at(lengths: Sequence[int], limit: int) -> int:
    """The length at which documents are cut that have room for `limit` tokens together.

    The longest are cut, all at the same length; at least one token of each is left.
    """
    room, left = limit, sorted(lengths)
    while left and left[0] * len(left) <= room:
        room -= left.pop(0)
    return max(1, room // len(left)) if left else max(lengths)


# One document per sample, by the names that torchtune's datasets have.
SINGLE = SampleForm()
