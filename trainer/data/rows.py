"""The rows of a dataset, opened by the library `datasets`: what all kinds of datasets share."""

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from runspec.storage import is_of_storage
from runspec.tables import separator
from trainer.data.origin import data_files
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

        if source == "csv":
            load_dataset_kwargs = _as_text(split, load_dataset_kwargs)
        rows = load_dataset(source, split=split, **load_dataset_kwargs)
        if source != "json":
            rows = rows.with_transform(partial(_without_filling, rows.features))
        self.rows = rows if filter_fn is None else rows.filter(filter_fn)

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, index: int) -> dict[str, Any]:
        """The columns of a row, which also name the line of a fault."""
        return dict(self.rows[index])

    @staticmethod
    def finite(row: Mapping[str, Any], column: str) -> Any:
        """The content of a column, None if there is none.

        Raises:
            ConfigError: a number in it, however deep, is NaN or infinite.
        """
        value = row.get(column)
        if (number := _non_finite(value)) is not None:
            raise ConfigError(f"the column {column!r} contains {number}; numbers must be finite")
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
                    f"the column {column!r} contains {row[column]!r}, which is not a text"
                )
        return [row[column] for column in columns]


def _non_finite(value: Any) -> float | None:
    if isinstance(value, float):
        return None if math.isfinite(value) else value
    inner = value.values() if isinstance(value, Mapping) else value
    if isinstance(value, Mapping | list):
        return next((found for each in inner if (found := _non_finite(each)) is not None), None)
    return None


def _without_filling(features: Mapping[str, Any], batch: Mapping[str, Any]) -> dict[str, Any]:
    """Columns without the nulls with which a table fills up a record that lacks a key.

    JSON says itself which keys a record has, and `datasets` keeps that.
    """
    return {
        name: [_own_keys(value, features.get(name)) for value in values]
        for name, values in batch.items()
    }


def _own_keys(value: Any, feature: Any) -> Any:
    if isinstance(feature, Mapping) and isinstance(value, Mapping):
        own = {key: inner for key, inner in value.items() if inner is not None}
        return {key: _own_keys(inner, feature.get(key)) for key, inner in own.items()}
    if isinstance(value, list):
        each = getattr(feature, "feature", None)
        return [_own_keys(inner, each) for inner in value]
    return value


def _as_text(split: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with which `datasets` reads each cell of a CSV as the text that stands there.

    By itself it makes numbers, truth values and nothing of some, whatever other rows hold. An empty
    cell is nothing.
    """
    from datasets import Features, Value, load_dataset

    plain = {"keep_default_na": False, "na_values": [""], **given}
    files = data_files({"source": "csv", **given})
    if files and not (plain.get("sep") or plain.get("delimiter")):
        plain["sep"] = separator(files[0])
    if plain.get("features") is None:
        whole = re.match(r"\w*", split)
        first: Mapping[str, Any] = {}
        try:
            others = {key: value for key, value in plain.items() if key != "num_proc"}
            name = whole[0] if whole else "train"
            first = next(iter(load_dataset("csv", split=name, streaming=True, **others)))
        except (ValueError, OSError, StopIteration) as error:
            # Read when the storage is back, cells would be numbers. Other reasons are said then.
            if is_of_storage(error):
                raise
        plain["features"] = Features({name: Value("string") for name in first}) if first else None
    return plain
