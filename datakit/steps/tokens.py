"""Token counts with the model's tokenizer and chat template."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from datakit.errors import DataError
from datakit.formats import turns_of
from datakit.rows import Rows, Work
from datakit.steps.filters import between, keep

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
    made = work.map(rows, "counted", "datakit.steps.tokens:count", options)
    figures = made.table.tokens
    sums = made.table.agg(sum=figures.sum(), least=figures.min(), most=figures.max())
    work.notes["tokens_before"] = work.engine.one(sums)
    return keep(made, work, between(figures, work.options))


# Arrow function ------------------------------------------------------------------------------


def count(table: Any, folder: str, where: str) -> Any:
    """Return the rows with the column tokens."""
    import pyarrow as pa
    from jinja2 import TemplateError

    from datakit.text import with_column

    tokenizer, template, special = _load(folder)
    texts = []
    for row in table.select(["_id", "prompt", "answer", "messages"]).to_pylist():
        turns = turns_of(row)
        if template is None or (row["prompt"] is None and not row["messages"]):
            texts.append("\n".join(turn["content"] for turn in turns))
            continue
        try:
            text = template.render(
                messages=turns,
                add_generation_prompt=False,
                tools=None,
                strftime_now=_DATE.strftime,
                **special,
            )
        except TemplateError as error:
            raise DataError(
                f"{where}: row {row['_id']}: the chat template refuses it: {error}: filter "
                "such rows"
            ) from None
        texts.append(text)
    encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=template is None)
    return with_column(table, "tokens", pa.array([len(each.ids) for each in encoded], pa.int64()))


@cache
def _load(name: str) -> tuple[Any, Any, Mapping[str, Any]]:
    from tokenizers import Tokenizer
    from transformers.utils.chat_template_utils import _compile_jinja_template

    folder = Path(name)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    file = folder / "chat_template.jinja"
    text = file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")
    if isinstance(text, list):
        text = next((each["template"] for each in text if each.get("name") == "default"), None)
    special = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in settings.items()
        if name.endswith("_token") and value
    }
    return tokenizer, _compile_jinja_template(text) if text else None, special
