"""Tiny model folders, and what may be odd about one: each change is what a tool or a user does."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

BEGIN, END, TEXT_END = "<|begin|>", "<|im_end|>", "<|endoftext|>"
SPECIAL = [BEGIN, "<|im_start|>", END, TEXT_END, "<|sep|>", "<|pad|>"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ROWS = 288
SIZES = {
    "vocab_size": ROWS,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    # So large that wrong weights show in the logits.
    "initializer_range": 0.3,
}
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
Change = Callable[[Path], object]


def write(folder: Path, seed: int = 0, **settings: Any) -> Path:
    """A Llama of random weights in one file, and a tokenizer of bytes with a ChatML template."""
    tokenizer = Tokenizer(
        models.BPE(
            {byte: n for n, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BEGIN, eos_token=END, pad_token="<|pad|>"
    )
    wrapped.chat_template = "{{ bos_token }}" + CHATML
    ids = {
        "bos_token_id": wrapped.bos_token_id,
        "eos_token_id": wrapped.eos_token_id,
        "pad_token_id": None,
    }
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | ids | settings))
    model.save_pretrained(folder)
    wrapped.save_pretrained(folder)
    return folder


def edit(name: str, **values: Any) -> Change:
    """Set keys of a JSON file, which is made if it is missing; None takes one out."""

    def change(folder: Path) -> None:
        file = folder / f"{name}.json"
        content = json.loads(file.read_text()) if file.is_file() else {}
        content = {k: v for k, v in (content | values).items() if v is not None}
        file.write_text(json.dumps(content))

    return change


def model_ids(**ids: Any) -> Change:
    """Set them in both files of the model that name such."""
    return all_of(edit("config", **ids), edit("generation_config", **ids))


def more_tokens(size: int, last: str) -> Change:
    """Add tokens to tokenizer.json until there are so many, of which this is the last."""

    def change(folder: Path) -> None:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        unused = [f"<unused{n}>" for n in range(size - 1 - tokenizer.get_vocab_size())]
        tokenizer.add_special_tokens([AddedToken(t, special=True) for t in (*unused, last)])
        tokenizer.save(str(folder / "tokenizer.json"))

    return change


def text(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content)


def without(*names: str) -> Change:
    return lambda folder: [(folder / name).unlink() for name in names]


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    """Change the tensors of the one file in place."""

    def changed(folder: Path) -> None:
        held = load_file(folder / WHOLE)
        change(held)
        save_file(held, folder / WHOLE, metadata={"format": "pt"})

    return changed


def cast(to: torch.dtype, **settings: Any) -> Change:
    return all_of(
        tensors(lambda held: held.update({k: t.to(to) for k, t in held.items()})),
        edit("config", **settings),
    )


def shards(count: int, index: bool = True, other: bool = False, named: str = "model") -> Change:
    """Write the weights, or those of another model, in so many files; the one file stays."""

    def change(folder: Path) -> None:
        held = load_file(folder / WHOLE)
        if other:
            held = {key: tensor + 1 for key, tensor in held.items()}
        files = [f"{named}-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)]
        placed = {key: files[n % count] for n, key in enumerate(sorted(held))}
        for file in files:
            part = {key: held[key] for key in placed if placed[key] == file}
            save_file(part, folder / file, metadata={"format": "pt"})
        if index:
            content = {"metadata": {"total_size": 1}, "weight_map": placed}
            (folder / INDEX).write_text(json.dumps(content))

    return change


def all_of(*changes: Change) -> Change:
    def change(folder: Path) -> None:
        for each in changes:
            each(folder)

    return change


SHARDED = all_of(shards(2), without(WHOLE))


def consolidated(folder: Path) -> None:
    """Mistral's own file, whose tensors have other names."""
    held = {"tok_embeddings.weight": torch.ones(ROWS, 16), "output.weight": torch.ones(ROWS, 16)}
    save_file(held, folder / "consolidated.safetensors", metadata={"format": "pt"})


def copied(source: Path, folder: Path, change: Change) -> Path:
    shutil.copytree(source, folder)
    change(folder)
    return folder
