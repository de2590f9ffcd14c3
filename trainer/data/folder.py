"""The tokenizer that transformers makes of a folder, and how its chat template ends an answer."""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from runspec import weights
from runspec.storage import ABSENT, patiently
from trainer.errors import ConfigError


def tokenizer_file(folder: Path) -> Path:
    """Return the path of tokenizer.json.

    Raises:
        ConfigError: there is none.
        OSError: it cannot be read.
    """
    file = folder / "tokenizer.json"
    try:
        patiently(_touch, file)
    except ABSENT:
        missing = f"tokenizer.path: {file} is missing; give a Hugging Face folder"
        raise ConfigError(missing) from None
    return file


def _touch(path: Path) -> None:
    with open(path, "rb") as file:
        file.read(1)


def read_tokenizer(folder: Path, **options: Any) -> Any:
    """What AutoTokenizer makes of a folder, tried again while the storage cannot be read.

    It runs no code of the folder. transformers chooses the class by config.json too, which of an
    adapter is stored with its base.
    """
    from transformers import AutoTokenizer

    # transformers takes a file that it cannot read for one that is not there.
    for path in weights.tokenizer_files(folder):
        patiently(_touch, path)

    def read(path: Path) -> Any:
        return AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False, **options
        )

    config = model_file(folder, "config.json")
    if config.parent == folder or not config.is_file():
        return patiently(read, folder)
    patiently(_touch, config)
    with TemporaryDirectory() as together:
        for path in (*folder.iterdir(), config):
            (Path(together) / path.name).symlink_to(path.resolve())
        return patiently(read, Path(together))


def model_file(folder: Path, name: str) -> Path:
    """The path of a file of a model's folder: an adapter's own, else its base's."""
    own = folder / name
    base = None if own.is_file() else weights.base_of(folder)
    return own if base is None else base / name


def opened(folder: Path) -> Any:
    """The tokenizer that transformers makes of a folder, if the kit can use it.

    Raises:
        ConfigError: tokenizer.json is missing, or transformers makes nothing of it.
    """
    tokenizer_file(folder)
    try:
        found = read_tokenizer(folder)
    except Exception as error:
        # One with a number is the storage's; the libraries raise most others.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = " ".join(str(error).split("\n")[:1]) or repr(error)
        raise ConfigError(
            f"tokenizer.path: {folder} cannot be opened by transformers ({reason}); download "
            "its tokenizer again, or give another folder"
        ) from None
    if not found.is_fast:
        raise ConfigError(
            f"tokenizer.path: transformers makes a {type(found).__name__} of {folder}, which does "
            "not say where in a text a token is; give a folder with a tokenizer.json for it"
        )
    return found


def answer_end(
    tokenizer: Any,
    known: set[int],
    template: str | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> int | None:
    """The token that the chat template puts behind an answer; None if it puts none there.

    Args:
        tokenizer: of transformers.
        known: tokens that end a text; another one of the vocabulary's added tokens must stand
            first behind the answer.
        template: in the place of the tokenizer's own.
        arguments: of the template.
    """
    _, tail = answered(tokenizer, template, arguments)
    ids = tokenizer(tail.strip(), add_special_tokens=False)["input_ids"]
    added = set(tokenizer.added_tokens_decoder)
    return next((i for i in ids if i in known), next((i for i in ids[:1] if i in added), None))


def answered(
    tokenizer: Any, template: str | None, arguments: Mapping[str, Any] | None = None
) -> tuple[str, str]:
    """What the chat template makes of a question and its answer, and what is behind the answer."""
    mark = "qzq"
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": mark}]
    try:
        text = tokenizer.apply_chat_template(
            turns, chat_template=template, tokenize=False, **(arguments or {})
        )
    except Exception:
        # Templates raise what they like, such as for a conversation that lacks a system prompt.
        return "", ""
    _, found, tail = str(text).rpartition(mark)
    return str(text), tail if found else ""
