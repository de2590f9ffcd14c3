"""Make a small Llama model from a seed: python -m trainer.demo <folder> --dataset <jsonl>

Its tokenizer is trained on the dataset's text. Nothing is downloaded, and the same seed and
dataset give the same bytes.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runspec import publish
from trainer.data import origin
from trainer.errors import ConfigError

VOCAB_SIZE = 1024
SPECIAL_TOKENS = ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# What differs from transformers' own values of a Llama.
ARCHITECTURE = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-05,
}


def make(folder: Path, dataset: Path, seed: int = 0) -> None:
    """Write the model folder, complete or not at all; an existing one is replaced.

    Raises:
        ConfigError: the dataset is missing, is no JSON lines, or has no text.
    """
    texts = _texts(dataset)
    with publish.folder(folder, "replace") as temporary:
        tokenizer = _tokenizer(texts)
        tokenizer.save_pretrained(temporary)
        random_model(ARCHITECTURE, seed, tokenizer).save_pretrained(temporary)


def _texts(dataset: Path) -> list[str]:
    try:
        lines = dataset.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"--dataset {dataset}: cannot be read: {error}") from None
    texts = origin.texts(rows)
    if not texts:
        raise ConfigError(f"--dataset {dataset}: has no text")
    return texts


def _tokenizer(texts: list[str]) -> Any:
    """A byte-level BPE trained on `texts`, with the chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[-1],
        pad_token=SPECIAL_TOKENS[0],
        model_max_length=ARCHITECTURE["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def random_model(architecture: Mapping[str, Any], seed: int, tokenizer: Any) -> Any:
    """A Llama of random weights, as transformers initialises it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = LlamaConfig(
        **architecture,
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def main(arguments: list[str]) -> int:
    """Make the folder; exit status 0 or 1."""
    parser = argparse.ArgumentParser(prog="python -m trainer.demo", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dataset", type=Path, required=True, help="JSON lines with text")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        make(options.folder.absolute(), options.dataset, options.seed)
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"demo model written to {options.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
