"""The rows of a training recipe's dataset block, as an evaluation asks and searches them.

A block is read by the code that reads it for training, so that a question is the one that was
trained, and split, files and columns are those of the run.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from runspec.keys.fields import STREAM
from trainer.config import component, instantiate
from trainer.data import origin
from trainer.data.conversations import Chats
from trainer.data.form import SampleForm
from trainer.data.preferences import PAIR_COLUMNS
from trainer.data.rows import EMPTY_QUESTION, Rows
from trainer.data.source import opened, read_block
from trainer.errors import ConfigError

T = TypeVar("T")
Turns = list[dict[str, Any]]

# Maximum number of faults that are reported.
FAULTS = 5

_PAIRS = SampleForm(preferences="trainer.data.preferences.PreferenceDataset")
# What components take besides the keys of Rows.
_COMPONENT_KEYS = (
    *("column_map", "column", "add_eos", "train_on_input", "new_system_prompt", "prompt", "answer"),
    *("conversation_column", "conversation_style", "tools_column", "train_on"),
    "drop_invalid",
)


def conversations(
    key: str, block: dict[str, Any], limit: int | None
) -> list[tuple[int, Turns, dict[str, Any]]]:
    """Return number, turns and columns of the first rows; the last turn is the answer.

    Args:
        key: of the suite, in messages.
        limit: how many rows; None for all.

    Raises:
        ConfigError: the block cannot be opened, or has no questions; or names the rows at fault.
    """
    block = read_block(block, _PAIRS)
    rows = opened(key, block, lambda: _chats(key, block))

    def read(index: int, _: dict[str, Any]) -> Turns:
        turns = rows.turns(index)
        if len(turns) < 2 or turns[-1]["role"] != "assistant":
            raise ConfigError("it does not end with an answer")
        if turns[-2]["role"] == "user" and not turns[-2]["content"].strip():
            raise ConfigError(EMPTY_QUESTION)
        return turns

    return _read(key, block, rows, limit, read)


def pairs(
    key: str, block: dict[str, Any], limit: int | None
) -> list[tuple[int, dict[str, Any], dict[str, Any]]]:
    """As `conversations`, with pairs, whose parts have the names of trainer.data.preferences."""
    block = read_block(block, _PAIRS)
    columns = block.get("column_map") or {}

    def read(_: int, row: dict[str, Any]) -> dict[str, Any]:
        pair = {name: row.get(columns.get(name, name)) for name in PAIR_COLUMNS}
        if not (pair["chosen"] and pair["rejected"]):
            raise ConfigError("there are no chosen and rejected answers")
        return {name: value for name, value in pair.items() if value is not None}

    return _read(key, block, _rows(key, block), limit, read)


def _read(
    key: str,
    block: dict[str, Any],
    rows: Rows,
    limit: int | None,
    read: Callable[[int, dict[str, Any]], T],
) -> list[tuple[int, T, dict[str, Any]]]:
    found: list[tuple[int, T, dict[str, Any]]] = []
    faults: list[str] = []
    for index in range(len(rows)):
        if len(found) == limit or len(faults) == FAULTS:
            break
        row = rows.row(index)
        try:
            found.append((index, read(index, row), row))
        except ConfigError as error:
            faults.append(f"{key}: {origin.of_sample(block, index, row)}: {error}")
    if faults:
        raise ConfigError(*faults)
    return found


def texts(key: str, block: dict[str, Any]) -> Iterator[str]:
    """Yield every text of every row, whatever is trained of it."""
    rows = _rows(key, read_block(block, _PAIRS))
    for index in range(len(rows)):
        yield from origin.texts(rows.row(index))


def _rows(key: str, block: dict[str, Any]) -> Rows:
    if block["_component_"] == STREAM:
        raise ConfigError(f"{key}: is a stream, which is not read from its beginning")
    if "source" not in block:
        # The component knows the dataset's name.
        return opened(key, block, lambda: _chats(key, block))
    kept = {k: v for k, v in block.items() if k not in ("_component_", *_COMPONENT_KEYS)}
    if isinstance(kept.get("filter_fn"), dict):
        kept["filter_fn"] = component(f"{key}.filter_fn", kept["filter_fn"]["_component_"])
    return opened(key, block, lambda: Rows(**kept))


def _chats(key: str, block: dict[str, Any]) -> Chats:
    name = block["_component_"].rpartition(".")[2]
    # Without a tokenizer it only gives its turns.
    made = None if block["_component_"] == STREAM else instantiate(key, block, None)
    if not isinstance(made, Chats):
        raise ConfigError(f"{key}: {name} has no questions and answers that could be asked")
    return made
