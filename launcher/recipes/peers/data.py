"""Datasets of other trainers' configs as dataset blocks of a recipe."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from launcher.recipes.own_data import SUFFIXES
from launcher.recipes.peers.table import Answer, Draft

CHAT = "torchtune.datasets.chat_dataset"
INSTRUCT = "torchtune.datasets.instruct_dataset"
ALPACA = "torchtune.datasets.alpaca_dataset"
TEXTS = "torchtune.datasets.text_completion_dataset"
PAIRS = "trainer.data.preferences.PreferenceDataset"
SINGLES = "trainer.data.preferences.UnpairedPreferenceDataset"
_HUB = re.compile(r"[\w.-]+/[\w.-]+")
# Turns without a chat template: the texts follow each other, with the tokenizer's first and last
# token, as Alpaca's prompt and other plain prompts are trained.
PLAIN = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content']"
    " + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
ONE_DATASET = (
    "a recipe trains on one dataset: mix them by cookbook prepare and give "
    "--data prepared:NAME@SPLIT, or give --data FILE"
)


class Form(NamedTuple):
    """The data that a method trains on, and the component that reads them.

    answers: to a prompt: conversations. preferences: among answers. labelled: one answer, good or
    bad. plain: texts. names_loss: the method has several losses.
    """

    component: str
    answers: bool = False
    preferences: bool = False
    labelled: bool = False
    plain: bool = False
    names_loss: bool = False


_FORMS = {
    "sft": Form(CHAT, answers=True),
    "dpo": Form(PAIRS, preferences=True, names_loss=True),
    "reward": Form(PAIRS, preferences=True),
    "kto": Form(SINGLES, preferences=True, labelled=True),
    "pretrain": Form(TEXTS, plain=True),
}


def form(draft: Draft) -> Form:
    """What the method of a draft trains on."""
    return _FORMS.get(draft.entry, Form(CHAT))


def origin(
    draft: Draft, path: str, files: Any = None, name: Any = None, split: Any = None
) -> dict[str, Any]:
    """Where a dataset's rows are: files, a folder, or a dataset of the hub, which is downloaded."""
    suffix = Path(path).suffix.lower()
    dataset: dict[str, Any] = {"source": path}
    if suffix in SUFFIXES:
        dataset = {"source": SUFFIXES[suffix], "data_files": file(draft, path)}
    elif files:
        listed = [file(draft, each) for each in files] if isinstance(files, list) else files
        dataset["data_files"] = listed if isinstance(listed, list) else file(draft, listed)
    elif _HUB.fullmatch(path):
        draft.put("hub.dataset", path)
    if name and name != "default":
        dataset["name"] = name
    return {**dataset, "split": split or "train"}


def preferences(draft: Draft, block: dict[str, Any], columns: Mapping[str, Any]) -> None:
    """Put a dataset of preferences; columns by the names that the kit has for them."""
    renamed = {name: column for name, column in columns.items() if column and column != name}
    mapped = {"column_map": renamed} if renamed else {}
    put(draft, {**block, **mapped, "drop_invalid": True})


def put(draft: Draft, block: dict[str, Any]) -> None:
    """Put the dataset block, first what reads it."""
    draft.put("dataset", {"_component_": form(draft).component, **block})


def pack(draft: Draft, wanted: Any = False) -> None:
    """Say whether the dataset is packed, once all keys are read; plain texts always are."""
    block = draft.values.get("dataset")
    if isinstance(block, dict):
        block["packed"] = bool(wanted) or form(draft).plain


def packed(_: Draft, value: Any) -> Answer:
    """Answer for a key that `pack` is given."""
    return "dataset.packed=" + ("true" if value else "false")


def validation(draft: Draft, value: Any) -> Answer:
    """Validate on a share, or a number, of the training samples."""
    return draft.held_out(float(value))


def file(draft: Draft, name: Any) -> str:
    """A file as the job finds it: its path counts from the config's folder, or from the shell's."""
    path = Path(str(name)).expanduser()
    beside = Path(draft.folder) / path
    if "://" in str(name):
        return str(name)
    return str(beside.absolute() if beside.exists() else path.absolute())
