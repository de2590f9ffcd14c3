"""Example of your own training script: a transformers model with FSDP2 in plain PyTorch, resumable.

    cookbook submit --recipe examples/transformers_fsdp/transformers_fsdp.yaml

The kit starts it on every rank, with torchrun's environment variables and
  COOKBOOK_PARAMETERS  path of a YAML file with the recipe's parameters
  COOKBOOK_STOP_FILE   this file appears shortly before the time limit: save, report it, and exit
  COOKBOOK_ATTEMPT     number of this attempt, from 0
  RUN_DIR              the run directory: write all files to keep here
"""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import yaml
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

RUN_DIR = Path(os.environ["RUN_DIR"])
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if CUDA else torch.device("cpu")


def load_examples(parameters: dict, tokenizer) -> list[list[int]]:
    """Token ids of each question and answer, formatted with the chat template."""
    rows = [json.loads(line) for line in Path(parameters["dataset"]).read_text().splitlines()]
    turns = [
        [{"role": "user", "content": r["question"]}, {"role": "assistant", "content": r["answer"]}]
        for r in rows
    ]
    texts = [tokenizer.apply_chat_template(turn, tokenize=False) for turn in turns]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def batch(data: list[list[int]], step: int, parameters: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of this rank for a step. They are the same when a step is repeated."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(step))
    start = dist.get_rank() * parameters["batch_size"]
    rows = [torch.tensor(data[i]) for i in order[start : start + parameters["batch_size"]]]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    return tokens.to(DEVICE), labels.to(DEVICE)


def save(model, optimizer, step: int) -> None:
    """Write a checkpoint atomically, with a COMPLETE marker."""
    folder = RUN_DIR / "checkpoints" / f"step_{step}"
    temporary = folder.with_name(f".tmp_{folder.name}")
    weights, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": optimizer_state}, checkpoint_id=temporary)
    if dist.get_rank() == 0:
        (temporary / "COMPLETE").touch()
        temporary.rename(folder)
    dist.barrier()


def resume(model, optimizer) -> int:
    """Load the newest checkpoint; returns its step, or 0 if there is none."""
    steps = [int(marker.parent.name[5:]) for marker in RUN_DIR.glob("checkpoints/step_*/COMPLETE")]
    if not steps:
        return 0
    weights, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=RUN_DIR / "checkpoints" / f"step_{max(steps)}")
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return max(steps)


def main() -> None:
    parameters = yaml.safe_load(Path(os.environ["COOKBOOK_PARAMETERS"]).read_text())
    if CUDA:
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("cuda:nccl,cpu:gloo" if CUDA else "gloo")
    main_rank = dist.get_rank() == 0

    tokenizer = AutoTokenizer.from_pretrained(parameters["model"])
    model = AutoModelForCausalLM.from_pretrained(parameters["model"]).to(DEVICE)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=parameters["lr"])
    data = load_examples(parameters, tokenizer)
    step = resume(model, optimizer)

    while step < parameters["steps"]:
        tokens, labels = batch(data, step, parameters)
        loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        stop = torch.tensor(float(Path(os.environ["COOKBOOK_STOP_FILE"]).exists()))
        dist.all_reduce(stop)
        if main_rank:
            print(f"step {step}/{parameters['steps']}  loss {loss.item():.4f}", flush=True)
        if stop or step % parameters["save_every"] == 0 or step == parameters["steps"]:
            save(model, optimizer, step)
        if stop and step < parameters["steps"]:
            if main_rank:
                progress = {"state": "stopped", "attempt": int(os.environ["COOKBOOK_ATTEMPT"])}
                (RUN_DIR / "progress.json").write_text(json.dumps(progress))
            return

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    if main_rank:
        model.save_pretrained(RUN_DIR / "export", state_dict=weights)
        tokenizer.save_pretrained(RUN_DIR / "export")
        (RUN_DIR / "progress.json").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
