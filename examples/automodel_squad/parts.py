"""NeMo Automodel's own data, loss and schedule on a CPU: python parts.py MODEL DATA LR EPOCHS

Its training recipe needs a GPU (docs/engines.md). These parts of it do not: the SQuAD dataset, the
collator, the masked cross-entropy, normalized by the step's trained tokens, and the schedule. The
loop around them does what the recipe says: 64 samples per step in batches of 8, gradients clipped
at 1.0, Adam. It prints a JSON line with the losses of all steps. Needs nemo-automodel.
"""

import json
import sys

import torch
from nemo_automodel.components.datasets.llm.squad import make_squad_dataset
from nemo_automodel.components.datasets.utils import default_collater
from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy
from nemo_automodel.components.optim.scheduler import OptimizerParamScheduler
from transformers import AutoModelForCausalLM, AutoTokenizer

GLOBAL_BATCH, LOCAL_BATCH = 64, 8
folder, data, lr, epochs = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
rows = make_squad_dataset(AutoTokenizer.from_pretrained(folder), dataset_name=data, split="train")
optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.9, 0.999), eps=1e-8)
steps = epochs * (len(rows) // GLOBAL_BATCH)
# A tenth of the steps is the warm-up, from a tenth of the rate, as its LRSchedulerConfig has it.
schedule = OptimizerParamScheduler(
    optimizer=optimizer,
    init_lr=lr * 0.1,
    max_lr=lr,
    min_lr=lr * 0.1,
    lr_warmup_steps=steps // 10,
    lr_decay_steps=steps,
    lr_decay_style="cosine",
    start_wd=0.0,
    end_wd=0.0,
    wd_incr_steps=steps,
    wd_incr_style="constant",
)
loss_of = MaskedCrossEntropy(reduction="sum")
losses = []
for _ in range(epochs):
    for first in range(0, len(rows), GLOBAL_BATCH):
        batches = [
            default_collater([rows[index] for index in range(start, start + LOCAL_BATCH)])
            for start in range(first, first + GLOBAL_BATCH, LOCAL_BATCH)
        ]
        trained = sum(int((batch["labels"] != -100).sum()) for batch in batches)
        total = 0.0
        for batch in batches:
            logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            loss = loss_of(logits, batch["labels"], num_label_tokens=trained)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step(1)
        optimizer.zero_grad()
        losses.append(total)
print(json.dumps({"losses": losses}))
