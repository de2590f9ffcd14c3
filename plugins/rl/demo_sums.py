"""Make a tiny model that adds digits: python -m plugins.rl.demo_sums FOLDER

It is trained for some seconds on right sums, then on random ones until it is right in a third of
its answers. Beside it are the prompts of configs/recipes/demo_grpo.yaml, prompts.jsonl. Nothing is
downloaded, and the same seed gives the same files on the same machine.
"""

import argparse
import json
import random
import sys
from itertools import product
from pathlib import Path
from typing import Any

from runspec import publish
from trainer.demo import random_model

PAIRS = tuple(product(range(10), repeat=2))
SYMBOLS = "0123456789+="
SPECIAL = ("<|begin|>", "<|end|>")
ARCHITECTURE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
# Steps on right sums; then at a fiftieth of the rate on random ones, until this many are right.
STEPS, MOST_RANDOM_STEPS, RIGHT, RATE = 200, 200, 0.35, 5e-3
HIGHEST = 18  # the largest sum of two digits


def make(folder: Path, seed: int = 0, steps: int = STEPS) -> None:
    """Write model, tokenizer and prompts, complete or not at all; an old folder is replaced."""
    with publish.folder(folder, "replace") as temporary:
        rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in PAIRS]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (temporary / "prompts.jsonl").write_text(text, encoding="utf-8")
        tokenizer = _tokenizer()
        tokenizer.save_pretrained(temporary)
        _trained(tokenizer, seed, steps).save_pretrained(temporary)


def _tokenizer() -> Any:
    """One token for each character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {text: number for number, text in enumerate((*SPECIAL, *SYMBOLS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        pad_token=SPECIAL[0],
        model_max_length=ARCHITECTURE["max_position_embeddings"],
    )


def _trained(tokenizer: Any, seed: int, steps: int) -> Any:
    import torch

    # Such small products are slower on several threads.
    torch.set_num_threads(1)
    draw, model = random.Random(seed), random_model(ARCHITECTURE, seed, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    end = tokenizer.eos_token_id
    prompts = [tokenizer.encode(f"{SPECIAL[0]}{a}+{b}=") for a, b in PAIRS]
    # Label i is token i; the model shifts them.
    answers = [[*tokenizer.encode(str(n)), end] for n in range(HIGHEST + 1)]
    labels = [own + [-100] * (3 - len(own)) for own in answers]
    asked, tokens = torch.tensor(prompts), torch.tensor(labels)
    masked = torch.full_like(asked, -100)
    right = [a + b for a, b in PAIRS]

    def outputs(sums: list[int]) -> Any:
        own = tokens[sums]
        ids = torch.cat([asked, own.clamp_min(0)], 1)
        return model(ids, labels=torch.cat([masked, own], 1))

    def share_right() -> float:
        """How likely the right answer is, on average."""
        own = tokens[right]
        with torch.no_grad():
            logits = outputs(right).logits[:, asked.shape[1] - 1 : -1]
        log_probs = logits.log_softmax(-1).gather(-1, own.clamp_min(0)[..., None])[..., 0]
        return float(log_probs.masked_fill(own < 0, 0).sum(1).exp().mean())

    for step in range(steps + MOST_RANDOM_STEPS):
        if step == steps:
            optimizer.param_groups[0]["lr"] = RATE / 50
        if step >= steps and share_right() <= RIGHT:
            break
        sums = right if step < steps else [draw.randint(0, HIGHEST) for _ in PAIRS]
        outputs(sums).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def main(arguments: list[str]) -> int:
    """Make the folder; exit status 0 or 1."""
    parser = argparse.ArgumentParser(prog="python -m plugins.rl.demo_sums", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        make(options.folder.absolute(), options.seed)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"model and prompts written to {options.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
