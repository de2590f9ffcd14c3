"""Makes questions in the form of SQuAD and a tiny Llama for them: python data.py DATA MODEL

DATA gets train.jsonl and validation.jsonl, with the columns of rajpurkar/squad: a context, a
question, and answers that stand in the context. MODEL gets random weights, no chat template, and
a tokenizer that begins texts with its first token, like the base model Llama 3.2 1B.
"""

import json
import sys
from pathlib import Path

from tokenizers import processors
from transformers import AutoTokenizer

from trainer import demo

SOURCE = Path(__file__).parents[2] / "configs" / "datasets" / "slurm_qa.jsonl"
SPLITS = {"train": slice(0, 384), "validation": slice(384, None)}
data, model = map(Path, sys.argv[1:])
rows = []
for line in SOURCE.read_text(encoding="utf-8").splitlines():
    pair = json.loads(line)
    span = " ".join(pair["answer"].split()[:5])
    answers = {"text": [span], "answer_start": [0]}
    rows.append({"context": pair["answer"], "question": pair["question"], "answers": answers})
data.mkdir(parents=True, exist_ok=True)
for split, part in SPLITS.items():
    text = "".join(json.dumps(row) + "\n" for row in rows[part])
    (data / f"{split}.jsonl").write_text(text, encoding="utf-8")
demo.make(model, SOURCE)
(model / "chat_template.jinja").unlink()
tokenizer = AutoTokenizer.from_pretrained(model)
bos = tokenizer.bos_token
tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
    single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
)
tokenizer.save_pretrained(model)
