"""The class of transformers that a model folder's weights belong to."""

import os
from pathlib import Path
from typing import Any

from runspec.storage import patiently


def load_config(file: Path) -> Any:
    """The config of a model folder, or of its config.json; no code of the folder runs.

    Raises:
        ValueError, TypeError, KeyError, OSError, StrictDataclassError: transformers refuses it.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoConfig

    return patiently(lambda path: AutoConfig.from_pretrained(path, trust_remote_code=False), file)


def load_class(config: Any) -> Any:
    """The auto class of a folder's config, for training, generation, evaluation and serving.

    A model of text and images is its whole class, even if transformers has a class for its text
    part alone: an adapter's names for PEFT and vLLM are those of the whole class.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    larger = config.get_text_config() is not config
    if larger and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM
