"""The token that ends an answer, in every file of an exported folder that names one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runspec import files
from trainer.data.tokenizers import hugging_face_tokenizer

_EOS = "eos_token_id"
GENERATION = "generation_config.json"


def name_answer_end(folder: Path, arguments: Mapping[str, Any] | None = None) -> None:
    """Let model and tokenizer end a text by the token that the chat template ends an answer with.

    A base model that has learnt a chat template would go on behind its answers otherwise. What
    config.json and generation_config.json name stays beside it.

    Args:
        arguments: of the chat template, in training.
    """
    if not (folder / "tokenizer.json").is_file():
        return
    tokenizer = hugging_face_tokenizer(str(folder), chat_template_kwargs=arguments)
    if (end := tokenizer.answer_end) is None:
        return
    was_known = False
    for name in ("config.json", GENERATION):
        settings = files.read_json(folder / name)
        if settings is None:
            continue
        text = settings.get("text_config")
        parts = (settings, text) if isinstance(text, dict) and _EOS in text else (settings,)
        lacking = [part for part in parts if end not in _listed(part.get(_EOS))]
        was_known |= len(lacking) < len(parts)
        for part in lacking:
            known = _listed(part.get(_EOS))
            part[_EOS] = [end, *known] if known else end
        if lacking:
            files.write_json(folder / name, settings)
    # A template that writes eos_token itself would write another text then.
    if not was_known and not tokenizer.writes("eos_token"):
        token = tokenizer.token(end)
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            settings = files.read_json(folder / name)
            if settings is not None and (
                name == "tokenizer_config.json" or "eos_token" in settings
            ):
                files.write_json(folder / name, settings | {"eos_token": token})


def generation_settings(folder: Path) -> dict[str, Any]:
    """What a folder's generation_config.json says; without it the ends that config.json names."""
    if (own := files.read_object(folder / GENERATION)) is not None:
        return own
    config = files.read_object(folder / "config.json") or {}
    named = config.get(_EOS, (config.get("text_config") or {}).get(_EOS))
    return {} if named is None else {_EOS: named}


def _listed(value: Any) -> list[int]:
    return [] if value is None else value if isinstance(value, list) else [value]
