"""Makes tiny Llamas under the names of the sweep's models, and its data: python models.py ROOT

The sizes grow as the real ones do. ROOT/models gets a folder for each, with random weights and one
tokenizer; ROOT/instructions/train.jsonl gets rows in the form of Alpaca's.
"""

import json
import sys
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from trainer import demo

SOURCE = Path(__file__).parents[2] / "configs" / "datasets" / "slurm_qa.jsonl"
# Hidden size and layers of each.
SIZES = {
    "TinyLlama-1.1B-intermediate-step-1431k-3T": (320, 4),
    "open_llama_3b": (384, 6),
    "open_llama_7b": (512, 8),
    "open_llama_13b": (768, 10),
}
root = Path(sys.argv[1])
first = root / "models" / "demo-llama"
demo.make(first, SOURCE)
tokenizer = AutoTokenizer.from_pretrained(first)
for name, (hidden, layers) in SIZES.items():
    config = AutoConfig.from_pretrained(first)
    config.hidden_size, config.intermediate_size = hidden, 4 * hidden
    config.num_hidden_layers, config.head_dim = layers, 64
    config.num_attention_heads = config.num_key_value_heads = hidden // 64
    AutoModelForCausalLM.from_config(config).save_pretrained(root / "models" / name)
    tokenizer.save_pretrained(root / "models" / name)
rows = map(json.loads, SOURCE.read_text(encoding="utf-8").splitlines())
keys = {"instruction": "question", "output": "answer"}
lines = [json.dumps({"input": "", **{k: row[v] for k, v in keys.items()}}) + "\n" for row in rows]
folder = root / "instructions"
folder.mkdir(parents=True, exist_ok=True)
(folder / "train.jsonl").write_text("".join(lines[:256]), encoding="utf-8")
