"""Ask a Hugging Face model folder: python -m trainer.generate <folder> "question" ..."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from runspec import files
from trainer.errors import ConfigError


def answers(
    folder: Path, prompts: list[str], max_new_tokens: int, device: torch.device
) -> Iterator[tuple[str, str]]:
    """(prompt, answer) one by one, greedily, through the model's own chat template.

    Raises:
        ConfigError: the folder holds no model or no tokenizer with a chat template.
    """
    # A model folder is all that is asked for; nothing is looked up on the network.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import pipeline
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    # transformers imports torchao if it is there, and no kernel of torchao is used here.
    logging.getLogger("torchao").setLevel(logging.ERROR)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder}: holds no model (config.json is missing)")
    ask = pipeline("text-generation", str(folder), dtype="auto", device=device)
    greedy = {"do_sample": False, "temperature": None, "top_p": None}
    for prompt in prompts:
        turns = [{"role": "user", "content": prompt}]
        (found,) = ask(turns, max_new_tokens=max_new_tokens, return_full_text=False, **greedy)
        yield prompt, found["generated_text"].strip()


def write_samples(path: Path, folder: Path, settings: dict[str, Any], device: torch.device) -> None:
    """Answer a config's `generate` prompts by the model in `folder`; print and write them.

    Args:
        path: gets one JSON line {"prompt", "answer"} per prompt.
        settings: prompts, and max_new_tokens (128 by default).
    """
    lines = []
    limit = settings.get("max_new_tokens", 128)
    for prompt, answer in answers(folder, settings["prompts"], limit, device):
        print(f"\nquestion  {prompt}\nanswer    {answer}", flush=True)
        lines.append(json.dumps({"prompt": prompt, "answer": answer}, ensure_ascii=False) + "\n")
    files.write_text(path, "".join(lines))
    print(flush=True)


def main(arguments: list[str]) -> int:
    """Print an answer for each question; exit status 0 or 1."""
    parser = argparse.ArgumentParser(prog="python -m trainer.generate", description=__doc__)
    parser.add_argument("folder", type=Path, help="a Hugging Face model folder, such as export/")
    parser.add_argument("question", nargs="+")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        for _, answer in answers(options.folder, options.question, options.max_new_tokens, device):
            print(answer, flush=True)
    except (ConfigError, OSError, ValueError) as error:
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
