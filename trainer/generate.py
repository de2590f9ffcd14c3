"""Ask a Hugging Face model folder: python -m trainer.generate <folder> "question" ..."""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from runspec import files
from runspec.processes import end_with_torchrun
from trainer.config import read_yaml
from trainer.data.folder import read_tokenizer
from trainer.errors import ConfigError
from trainer.inference import loading, pipeline
from trainer.parallel.device import own


def answers(
    folder: Path, prompts: list[str], max_new_tokens: int, device: torch.device, ranks: int = 1
) -> Iterator[tuple[str, str]]:
    """(prompt, answer) one by one, greedily, through the model's own chat template.

    Args:
        ranks: over how many its layers are spread; all of them call this together.

    Raises:
        ConfigError: the folder has no model or no tokenizer with a chat template.
    """
    loading.stay_offline_and_quiet()
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder}: has no model (config.json is missing)")
    model = loading.language_model(folder, "auto", device, ranks)
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
                **pipeline.generate_options(model, ranks),
            )
        yield prompt, tokenizer.decode(both[ids.shape[1] :], skip_special_tokens=True).strip()


def write_samples(config: Path) -> None:
    """Answer a run's `generate` prompts by its export; print and write them, one JSON line each.

    All ranks of a node call this; where the model fits one GPU, those after the first do nothing.

    Args:
        config: the run's train.yaml.
    """
    content, rank = read_yaml(config), int(os.environ.get("RANK", 0))
    folder, settings = config.parent / files.EXPORT, content.get("generate")
    if not settings or not folder.is_dir():
        return
    device = own(str(content.get("device", "auto")))
    bytes_of = {"bf16": 2}.get(str(content.get("dtype")), 4)
    ranks = pipeline.ranks_needed(folder, bytes_of, device)
    if rank >= ranks:
        return
    lines = []
    limit = settings.get("max_new_tokens", 128)
    for prompt, answer in answers(folder, settings["prompts"], limit, device, ranks):
        if rank == 0:
            print(f"\nquestion  {prompt}\nanswer    {answer}", flush=True)
        content = {"prompt": prompt, "answer": answer}
        lines.append(json.dumps(content, ensure_ascii=False) + "\n")
    if rank == 0:
        files.write_text(config.parent / files.SAMPLES, "".join(lines))
        print(flush=True)


def main(arguments: list[str]) -> int:
    """Print an answer for each question; exit status 0 or 1."""
    parser = argparse.ArgumentParser(prog="python -m trainer.generate", description=__doc__)
    parser.add_argument(
        "folder",
        type=Path,
        help="a Hugging Face model folder, such as export/; or a run's train.yaml, to answer its "
        "`generate` prompts in the run",
    )
    parser.add_argument("question", nargs="*", help="not with a train.yaml")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    options = parser.parse_args(arguments)
    end_with_torchrun()
    of_run = options.folder.is_file()
    if not of_run and not options.question:
        parser.error("give a question")
    try:
        if of_run:
            write_samples(options.folder.absolute())
            return 0
        folder, questions, limit = options.folder, options.question, options.max_new_tokens
        for _, answer in answers(folder, questions, limit, own("auto")):
            print(answer, flush=True)
    except (ConfigError, OSError, ValueError) as error:
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    from trainer.start import leave  # the ranks of a spread model have a process group

    leave(main(sys.argv[1:]))
