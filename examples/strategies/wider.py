"""Makes a wider model with random weights and a model's tokenizer: python wider.py MODEL FOLDER"""

import logging
import sys
from pathlib import Path

import torch

# transformers imports torchao if it is installed. Its kernels are not used here.
logging.getLogger("torchao").setLevel(logging.ERROR)
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: E402

model, folder = map(Path, sys.argv[1:])
config = AutoConfig.from_pretrained(model)
config.hidden_size, config.intermediate_size = 2 * config.hidden_size, 2 * config.intermediate_size
config.num_attention_heads *= 2
config.num_key_value_heads *= 2
torch.manual_seed(0)
AutoModelForCausalLM.from_config(config).save_pretrained(folder)
AutoTokenizer.from_pretrained(model).save_pretrained(folder)
