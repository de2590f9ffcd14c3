"""Token counts with the model's tokenizer and chat template."""

from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from plugins.data.errors import DataError
from plugins.data.formats import turns_of
from plugins.data.rows import Rows, Work
from plugins.data.steps.filters import between, keep

# Templates that print the date give the same count every day.
_DATE = datetime(2024, 7, 26, tzinfo=UTC)


def tokens(rows: Rows, work: Work) -> Rows:
    """Add the column `tokens`, and keep the rows with `min` to `max` tokens.

    tokenizer: the model's folder, with its tokenizer.json. Its chat template, if there is one, is
    applied to the conversation first, but not to a plain text.
    """
    folder = Path(str(work.options["tokenizer"])).expanduser()
    if not (folder / "tokenizer.json").is_file():
        raise DataError(
            f"{work.where}.tokenizer: {folder} has no tokenizer.json: give the model's folder; "
            "cookbook download gets one"
        )
    options = {"folder": str(folder), "where": work.where}
    made = work.map(rows, "counted", "plugins.data.steps.tokens:count", options)
    figures = made.table.tokens
    sums = made.table.agg(sum=figures.sum(), least=figures.min(), most=figures.max())
    work.notes["tokens_before"] = work.engine.one(sums)
    return keep(made, work, between(figures, work.options))


# Arrow function ------------------------------------------------------------------------------


def count(table: Any, folder: str, where: str) -> Any:
    """Return the rows with the column tokens."""
    import pyarrow as pa
    from jinja2 import TemplateError

    from plugins.data.text import with_column

    tokenizer = _load(folder)
    template = bool(tokenizer.chat_template)
    texts = []
    for row in table.select(["_id", "prompt", "answer", "messages"]).to_pylist():
        turns = turns_of(row)
        if not template or (row["prompt"] is None and not row["messages"]):
            texts.append("\n".join(turn["content"] for turn in turns))
            continue
        try:
            text = tokenizer.apply_chat_template(turns, tokenize=False, strftime_now=_DATE.strftime)
        except TemplateError as error:
            raise DataError(
                f"{where}: row {row['_id']}: the chat template refuses it: {error}: filter "
                "such rows"
            ) from None
        texts.append(text)
    backend = tokenizer.backend_tokenizer
    encoded = backend.encode_batch_fast(texts, add_special_tokens=not template)
    return with_column(table, "tokens", pa.array([len(each.ids) for each in encoded], pa.int64()))


@cache
def _load(folder: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer
