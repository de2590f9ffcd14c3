"""Ask a Hugging Face model folder: python -m trainer.generate <folder> "question" ..."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from trainer.data.folder import read_tokenizer
from trainer.errors import ConfigError
from trainer.inference import loading
from trainer.parallel.device import own


def answers(
    folder: Path, prompts: list[str], max_new_tokens: int, device: torch.device
) -> Iterator[tuple[str, str]]:
    """(prompt, answer) one by one, greedily, through the model's own chat template.

    Raises:
        ConfigError: the folder has no model or no tokenizer with a chat template.
    """
    loading.stay_offline_and_quiet()
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder}: has no model (config.json is missing)")
    model = loading.language_model(folder, "auto", device)
    tokenizer = read_tokenizer(folder)
    loading.decode_greedily(model, loading.end_tokens(model, tokenizer)[0], tokenizer.pad_token_id)
    for prompt in prompts:
        turns = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"].to(device)
        with torch.inference_mode():
            (both,) = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
            )
        yield prompt, tokenizer.decode(both[ids.shape[1] :], skip_special_tokens=True).strip()


def main(arguments: list[str]) -> int:
    """Print an answer for each question; exit status 0 or 1."""
    parser = argparse.ArgumentParser(prog="python -m trainer.generate", description=__doc__)
    folder_help = "a Hugging Face model folder, such as a run's export/"
    parser.add_argument("folder", type=Path, help=folder_help)
    parser.add_argument("question", nargs="+")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    options = parser.parse_args(arguments)
    try:
        folder, questions, limit = options.folder, options.question, options.max_new_tokens
        for _, answer in answers(folder, questions, limit, own("auto")):
            print(answer, flush=True)
    except (ConfigError, OSError, ValueError) as error:
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
