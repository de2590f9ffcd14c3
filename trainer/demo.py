"""Make a small Llama model from a seed: python -m trainer.demo <folder> --dataset <jsonl>

Its tokenizer is trained on the dataset's text. Nothing is downloaded, and the same seed and
dataset give the same bytes.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

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
ARCHITECTURE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
README = """# Demo model

A Llama-architecture language model of random weights (seed {seed}), with a byte-level BPE
tokenizer of {vocab} tokens trained on `{dataset}`. It knows nothing until it is fine-tuned: it
exists so that a whole fine-tune, from submit to answer, can be tried in minutes on a CPU.
Made by `python -m trainer.demo`; it can be deleted and made again.
"""


def make(folder: Path, dataset: Path, seed: int = 0) -> None:
    """Write the model folder, complete or not at all; an existing one is replaced.

    Raises:
        ConfigError: the dataset is missing, is no JSON lines, or holds no text.
    """
    texts = _texts(dataset)
    temporary = folder.with_name(f".tmp_{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        vocab = _write_tokenizer(temporary, texts)
        _write_model(temporary, seed, vocab)
        (temporary / "README.md").write_text(
            README.format(seed=seed, vocab=vocab, dataset=dataset.name), encoding="utf-8"
        )
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _texts(dataset: Path) -> list[str]:
    try:
        lines = dataset.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"--dataset {dataset}: cannot be read: {error}") from None
    texts = [
        value
        for row in rows
        if isinstance(row, dict)
        for value in row.values()
        if isinstance(value, str)
    ]
    if not texts:
        raise ConfigError(f"--dataset {dataset}: holds no text")
    return texts


def _write_tokenizer(folder: Path, texts: list[str]) -> int:
    """Train a byte-level BPE on `texts`; return the number of tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

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
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL_TOKENS[0],
            "eos_token": SPECIAL_TOKENS[-1],
            "pad_token": SPECIAL_TOKENS[0],
            "model_max_length": ARCHITECTURE["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return tokenizer.get_vocab_size()


def _write_model(folder: Path, seed: int, vocab: int) -> None:
    import torch
    from safetensors.torch import save_file

    ids = {"bos_token_id": 0, "eos_token_id": len(SPECIAL_TOKENS) - 1, "pad_token_id": 0}
    _write_json(folder / "config.json", ARCHITECTURE | ids | {"vocab_size": vocab})
    _write_json(folder / "generation_config.json", ids | {"do_sample": False})
    generator = torch.Generator().manual_seed(seed)
    layers = ARCHITECTURE["num_hidden_layers"]
    tensors = {}
    for name, shape in _shapes(vocab).items():
        if len(shape) == 1:
            tensors[name] = torch.ones(shape)
            continue
        # Layers that write to the residual stream start smaller (Radford et al. 2019, GPT-2).
        writes = name.endswith(("o_proj.weight", "down_proj.weight"))
        deviation = ARCHITECTURE["initializer_range"] / ((2 * layers) ** 0.5 if writes else 1)
        tensors[name] = torch.randn(shape, generator=generator) * deviation
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _shapes(vocab: int) -> dict[str, tuple[int, ...]]:
    width, inner = ARCHITECTURE["hidden_size"], ARCHITECTURE["intermediate_size"]
    head = ARCHITECTURE["head_dim"]
    queries = ARCHITECTURE["num_attention_heads"] * head
    keys = ARCHITECTURE["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, width)}
    for layer in range(ARCHITECTURE["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (width,),
            prefix + "self_attn.q_proj.weight": (queries, width),
            prefix + "self_attn.k_proj.weight": (keys, width),
            prefix + "self_attn.v_proj.weight": (keys, width),
            prefix + "self_attn.o_proj.weight": (width, queries),
            prefix + "post_attention_layernorm.weight": (width,),
            prefix + "mlp.gate_proj.weight": (inner, width),
            prefix + "mlp.up_proj.weight": (inner, width),
            prefix + "mlp.down_proj.weight": (width, inner),
        }
    return shapes | {"model.norm.weight": (width,), "lm_head.weight": (vocab, width)}


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


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
