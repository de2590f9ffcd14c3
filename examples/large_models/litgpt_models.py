"""Makes tiny models in LitGPT's form, as models.py does: python litgpt_models.py ROOT FOLDER

Runs in LitGPT's own environment. FOLDER gets checkpoints/ORGANISATION/NAME for each model of
litgpt.yaml, of the sizes and with the tokenizer of ROOT/models, and alpaca.json, the rows of
ROOT/instructions.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.utils import save_config

NAMES = (
    "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T",
    "openlm-research/open_llama_3b",
    "openlm-research/open_llama_7b",
    "openlm-research/open_llama_13b",
)
root, folder = map(Path, sys.argv[1:])
for name in NAMES:
    source = root / "models" / Path(name).name
    sizes = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config = Config(
        name=source.name,
        hf_config={"org": name.partition("/")[0], "name": source.name},
        vocab_size=sizes["vocab_size"],
        padded_vocab_size=sizes["vocab_size"],
        block_size=sizes["max_position_embeddings"],
        n_layer=sizes["num_hidden_layers"],
        n_embd=sizes["hidden_size"],
        n_head=sizes["num_attention_heads"],
        n_query_groups=sizes["num_key_value_heads"],
        intermediate_size=sizes["intermediate_size"],
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
    )
    target = folder / "checkpoints" / name
    target.mkdir(parents=True, exist_ok=True)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy2(source / file, target / file)
    torch.manual_seed(0)
    torch.save(GPT(config).state_dict(), target / "lit_model.pth")
    save_config(config, target)
lines = (root / "instructions" / "train.jsonl").read_text(encoding="utf-8").splitlines()
(folder / "alpaca.json").write_text(json.dumps([json.loads(line) for line in lines]))
