"""What a reward model's folder says of itself, for AutoModelForSequenceClassification."""

from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from runspec import files
from runspec.files import patient_json
from trainer.data.tokenizers import HuggingFaceTokenizer, hugging_face_tokenizer

TOKENIZER = "tokenizer_config.json"


def settings(config: Any, folder: Path) -> dict[str, Any]:
    """The fields of config.json that differ from the base model's.

    Args:
        config: the model's, of transformers.
        folder: the model's, with its tokenizer.
    """
    values: dict[str, Any] = {
        "architectures": [MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)].__name__],
        "num_labels": 1,
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }
    if (folder / "tokenizer.json").is_file():
        _, values["pad_token_id"] = pad_token(hugging_face_tokenizer(str(folder)))
    return values


def set_pad_token(folder: Path) -> None:
    """Let the tokenizer of an exported folder pad by the token that config.json names."""
    content = patient_json(folder / TOKENIZER)
    if content is not None and (folder / "tokenizer.json").is_file():
        name, _ = pad_token(hugging_face_tokenizer(str(folder)))
        files.write_json(folder / TOKENIZER, content | {"pad_token": name})


def pad_token(tokenizer: HuggingFaceTokenizer) -> tuple[str | None, int | None]:
    """A token to pad by that ends no document, and its number; None if there is no such token.

    transformers' classes take the score at the last token that is not this one. Padding by the end
    token, as is usual, would take it before the end of each document.
    """
    special = tokenizer.special_tokens
    names = {number: name for name, number in special.items()}
    unused = [number for name, number in special.items() if "pad" in name.lower()]
    order = [tokenizer.pad_id, *unused, tokenizer.bos_id, *special.values()]
    known = (number for number in order if number in names and number not in tokenizer.ends)
    number = next(known, None)
    return (None, None) if number is None else (names[number], number)
