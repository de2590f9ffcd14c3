"""Tiny model folders, and what may be odd about one: each change is what a tool or a user does."""

import json
import os
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


def decoder(kind: str, **settings: Any) -> Change:
    """Let tokenizer.json's decoder do something else last."""

    def change(folder: Path) -> None:
        content = json.loads((folder / "tokenizer.json").read_text())
        last = {"type": kind, **settings}
        content["decoder"] = {"type": "Sequence", "decoders": [content["decoder"], last]}
        (folder / "tokenizer.json").write_text(json.dumps(content))

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


# What transformers reads, and so does the trainer.
SAME: dict[str, Change] = {
    "one file": lambda folder: None,
    "shards and an index": SHARDED,
    "shards of another model left over": all_of(shards(3, index=False, other=True), SHARDED),
    "Mistral's own file beside shards": all_of(SHARDED, consolidated),
    "an index left over beside one file": shards(2, other=True),
    "another name by config.json": all_of(
        shards(1, index=False, named="mine"),
        shards(1, other=True, index=False),
        edit("config", transformers_weights="mine-00001-of-00001.safetensors"),
    ),
}
MAP = {"bos_token": BEGIN, "eos_token": END, "pad_token": "<|pad|>"}
NO_MAP = edit("tokenizer_config", **dict.fromkeys(MAP))
NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
EVERY = "".join("{% if X %}{{ X }}{% endif %}".replace("X", f"{name}_token") for name in NAMES)
SAME |= {
    "special tokens in special_tokens_map.json as objects": all_of(
        NO_MAP,
        edit("special_tokens_map", **{k: {"content": v, "lstrip": False} for k, v in MAP.items()}),
    ),
    "special_tokens_map.json says otherwise": all_of(
        edit("special_tokens_map", bos_token="<|sep|>"), model_ids(bos_token_id=260)
    ),
    "special_tokens_map.json beside a list of added tokens": all_of(
        edit("special_tokens_map", bos_token="<|sep|>"),
        edit("tokenizer_config", added_tokens_decoder={"256": {"content": BEGIN, "special": True}}),
    ),
    "special tokens as objects": edit(
        "tokenizer_config", **{k: {"__type": "AddedToken", "content": v} for k, v in MAP.items()}
    ),
    "special tokens by the tokenizer's class": all_of(
        NO_MAP,
        edit("tokenizer_config", tokenizer_class="Qwen2Tokenizer"),
        model_ids(eos_token_id=259),
    ),
    "no tokenizer_config.json": all_of(
        without("tokenizer_config.json"), edit("special_tokens_map", **MAP)
    ),
    "a template with every special token": all_of(
        edit(
            "tokenizer_config",
            sep_token="<|sep|>",
            cls_token=BEGIN,
            mask_token="<|pad|>",
            unk_token=TEXT_END,
        ),
        text("chat_template.jinja", EVERY + CHATML),
    ),
    "a template in tokenizer_config.json": all_of(
        without("chat_template.jinja"), edit("tokenizer_config", chat_template=CHATML)
    ),
    "templates by name": all_of(
        without("chat_template.jinja"),
        edit(
            "tokenizer_config",
            chat_template=[
                {"name": "tool_use", "template": "tools"},
                {"name": "default", "template": CHATML},
            ],
        ),
    ),
    "a token beyond the embedding": more_tokens(ROWS + 1, "<image_soft_token>"),
    "a padding token beyond the embedding": all_of(
        more_tokens(ROWS + 1, "<late_pad>"), edit("tokenizer_config", pad_token="<late_pad>")
    ),
    "a padding token that tokenizer.json lacks": all_of(
        more_tokens(ROWS, "<unused>"), edit("tokenizer_config", pad_token="<late_pad>")
    ),
}
HEAD, ROWS_OF = "lm_head.weight", "model.embed_tokens.weight"
TIED, UNTIED = edit("config", tie_word_embeddings=True), edit("config", tie_word_embeddings=False)
SAME |= {
    "a head of its own": UNTIED,
    "a head of its own, of which config.json says nothing": edit(
        "config", tie_word_embeddings=None
    ),
    "tied, and no head in the file": all_of(TIED, tensors(lambda held: held.pop(HEAD))),
    "tied, and a copy in the file": all_of(
        TIED, tensors(lambda held: held.update({HEAD: held[ROWS_OF].clone()}))
    ),
    "tied, shards": all_of(TIED, tensors(lambda held: held.pop(HEAD)), SHARDED),
    "rotary tables of old folders": tensors(
        lambda held: held.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    ),
    "float16": cast(torch.float16, dtype="float16"),
    "bfloat16 by the older key": cast(torch.bfloat16, dtype=None, torch_dtype="bfloat16"),
    "float32 that config.json calls bfloat16": edit("config", dtype="bfloat16"),
    "more than one dtype": tensors(
        lambda held: held.update({HEAD: held[HEAD].half(), ROWS_OF: held[ROWS_OF].bfloat16()})
    ),
    "float8 without a word": cast(torch.float8_e4m3fn),
    "no dtype": edit("config", dtype=None),
}
# By its name: the change, and what a refusal says.
REFUSED: dict[str, tuple[Change, tuple[str, ...]]] = {
    "a shard is missing": (
        all_of(SHARDED, without("model-00002-of-00002.safetensors")),
        ("model-00002-of-00002.safetensors is missing; download it",),
    ),
    "shards without an index": (
        all_of(SHARDED, without(INDEX)),
        ("contains model-00001-of-00002.safetensors, but neither", INDEX, "download the model"),
    ),
    "pickled weights": (
        all_of(text("pytorch_model.bin", ""), without(WHOLE)),
        ("has neither model.safetensors nor", "; download the model as"),
    ),
    "an index that is cut short": (
        all_of(SHARDED, text(INDEX, '{"weight_map": {')),
        (f"{INDEX} cannot be read; download it again",),
    ),
    "an adapter's config beside weights": (
        edit("adapter_config", base_model_name_or_path="/base"),
        ("has an adapter (adapter_config.json); give", "remove that file"),
    ),
    "a head that is missing": (
        all_of(UNTIED, tensors(lambda held: held.pop(HEAD))),
        ("tensor lm_head.weight is missing", "; "),
    ),
    "tied, and a head that differs": (
        TIED,
        ("lm_head.weight differs from", "config.json ties them; set tie_word_embeddings to false"),
    ),
    "a tensor of another model": (
        tensors(lambda held: held.update({"model.layers.7.mlp.up_proj.weight": torch.ones(2, 2)})),
        ("tensor model.layers.7.mlp.up_proj.weight belongs to no part of the model", "; "),
    ),
    "a tensor of another shape": (
        tensors(lambda held: held.update({HEAD: torch.ones(ROWS, 8)})),
        ("tensor lm_head.weight has shape", "; "),
    ),
    "quantised weights": (
        edit("config", quantization_config={"quant_method": "gptq", "bits": 4}),
        ("its weights are quantised (gptq); download the bf16 weights",),
    ),
    "a class that is not known": (
        edit("config", model_type="unheard"),
        ("no causal language model for config.json's model_type 'unheard'; choose another model",),
    ),
    "code in the folder": (
        edit("config", model_type="unheard", auto_map={"AutoModelForCausalLM": "own.Own"}),
        ("needs the code in its folder (auto_map)", "; choose a model"),
    ),
    "no config.json": (without("config.json"), ("config.json is missing", "; give a Hugging")),
    "a begin token beyond the embedding": (
        all_of(more_tokens(ROWS + 1, "<late>"), edit("tokenizer_config", bos_token="<late>")),
        (f"its bos_id is {ROWS}, the model knows {ROWS} tokens", "; give the tokenizer"),
    ),
    "a template's token beyond the embedding": (
        all_of(more_tokens(ROWS + 1, "<late>"), text("chat_template.jinja", "<late>" + CHATML)),
        (f"the chat template writes token {ROWS}", "; choose another tokenizer.chat_template"),
    ),
    "a tokenizer of a larger vocabulary": (
        edit("config", vocab_size=200),
        ("tokenizer: it has 256 tokens, the model knows 200; give the tokenizer",),
    ),
    "weights that are cut short": (
        lambda folder: os.truncate(folder / WHOLE, 1000),
        ("model.safetensors is damaged",),
    ),
    "no tokenizer.json": (
        without("tokenizer.json"),
        ("tokenizer.json is missing; give a Hugging Face folder",),
    ),
    "a tokenizer.json that is cut short": (
        text("tokenizer.json", "{"),
        ("cannot be opened by transformers", "; download its tokenizer again"),
    ),
    "a tokenizer's code in its folder": (
        edit(
            "tokenizer_config", tokenizer_class="Own", auto_map={"AutoTokenizer": [None, "own.Own"]}
        ),
        ("cannot be opened by transformers", "; download its tokenizer again"),
    ),
}
