"""The rows of a dataset, opened by the library `datasets`: what all kinds of datasets share."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from trainer.errors import ConfigError

EMPTY_QUESTION = "the question is empty: fill it, or take the row out"


class Rows:
    """A dataset whose samples are made of its rows when they are read.

    Args:
        source: a name of the Hugging Face Hub, a folder, or a kind of files, such as json.
        split: a part of it, such as train[:90%].
        filter_fn: keeps the rows for which it is true.
        load_dataset_kwargs: go to datasets.load_dataset, such as data_files.
    """

    def __init__(
        self,
        *,
        source: str,
        split: str = "train",
        filter_fn: Callable[..., bool] | None = None,
        **load_dataset_kwargs: Any,
    ) -> None:
        from datasets import load_dataset

        rows = load_dataset(source, split=split, **load_dataset_kwargs)
        self.rows = rows if filter_fn is None else rows.filter(filter_fn)

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, index: int) -> dict[str, Any]:
        """The columns of a row, which also name the line of a fault."""
        return dict(self.rows[index])

    @staticmethod
    def finite(row: Mapping[str, Any], column: str) -> Any:
        """What a column holds, None if there is none.

        Raises:
            ConfigError: a number in it, however deep, is NaN or infinite.
        """
        value = row.get(column)
        if (number := _non_finite(value)) is not None:
            raise ConfigError(f"the column {column!r} holds {number}; numbers must be finite")
        return value

    @staticmethod
    def texts(row: Mapping[str, Any], *columns: str) -> list[str]:
        """The texts of columns.

        Raises:
            ConfigError: one is missing, null, or no text.
        """
        if missing := [repr(column) for column in columns if column not in row]:
            raise ConfigError(f"there is no column {' and no '.join(missing)}")
        if missing := [repr(column) for column in columns if row[column] is None]:
            raise ConfigError(f"there is no {' and no '.join(missing)}")
        for column in columns:
            if not isinstance(row[column], str):
                raise ConfigError(
                    f"the column {column!r} holds {row[column]!r}, which is not a text"
                )
        return [row[column] for column in columns]


def _non_finite(value: Any) -> float | None:
    if isinstance(value, float):
        return None if math.isfinite(value) else value
    inner = value.values() if isinstance(value, Mapping) else value
    if isinstance(value, Mapping | list):
        return next((found for each in inner if (found := _non_finite(each)) is not None), None)
    return None
