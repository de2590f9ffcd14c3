"""Accuracy of a model on a split: python examples/support_intents/score.py EXPORT SPLIT_FOLDER"""

import argparse
import json
import logging
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="score.py")
    parser.add_argument("model", type=Path, help="the run's export")
    parser.add_argument("split", type=Path, help="folder of the split's Parquet files")
    parser.add_argument("--limit", type=int, default=1000)
    given = parser.parse_args()
    print(json.dumps(score(given.model, given.split, given.limit)))


def score(model_folder: Path, split: Path, limit: int) -> dict[str, float]:
    """Answer each prompt with greedy decoding, and return the share of exact matches."""
    import pyarrow.parquet as pq
    import torch

    # transformers imports torchao if it is installed. Its kernels are not used here.
    logging.getLogger("torchao").setLevel(logging.ERROR)
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    rows = [
        row for path in sorted(split.glob("*.parquet")) for row in pq.read_table(path).to_pylist()
    ]
    rows = rows[:limit]
    tokenizer = AutoTokenizer.from_pretrained(model_folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    right = 0
    for begin in range(0, len(rows), 64):
        batch = rows[begin : begin + 64]
        prompts = [
            tokenizer.apply_chat_template(
                row["messages"][:-1], tokenize=False, add_generation_prompt=True
            )
            for row in batch
        ]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        inputs.pop("token_type_ids", None)
        with torch.no_grad():
            made = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        answers = tokenizer.batch_decode(
            made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        right += sum(
            answer.strip() == row["messages"][-1]["content"]
            for answer, row in zip(answers, batch, strict=True)
        )
    return {"rows": len(rows), "accuracy": right / max(len(rows), 1)}


if __name__ == "__main__":
    main()
