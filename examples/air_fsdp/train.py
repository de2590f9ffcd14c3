"""Supervised fine-tuning of a causal model of transformers with FSDP2, as a workload of air.

It knows nothing of the kit: parameters come from the YAML file HYPERPARAMETERS_PATH, metrics go to
the MLflow run MLFLOW_RUN_ID, and a retry continues from its own newest checkpoint, four of which
are written. At the end output_dir holds the consolidated model, which from_pretrained loads.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import yaml
from datasets import load_dataset
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if CUDA else torch.device("cpu")


def main() -> None:
    given = yaml.safe_load(Path(os.environ["HYPERPARAMETERS_PATH"]).read_text())
    if CUDA:
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("cuda:nccl,cpu:gloo" if CUDA else "gloo")
    main_rank, output = dist.get_rank() == 0, Path(given["output_dir"])
    if main_rank:
        print(f"token: {'given' if os.environ.get('HF_TOKEN') else 'missing'}", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(given["model_name"])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model, optimizer = sharded(given)
    step = resumed(model, optimizer, output)
    metrics = tracked({**given, "world_size": dist.get_world_size()}) if main_rank else None
    rows = batches(tokenizer, given, step)
    while step < given["max_steps"]:
        for _ in range(given["gradient_accumulation_steps"]):
            batch = {name: part.to(DEVICE) for name, part in next(rows).items()}
            loss = model(**batch).loss
            (loss / given["gradient_accumulation_steps"]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if main_rank:
            print(f"step={step}/{given['max_steps']} loss={loss.item():.4f}", flush=True)
        if metrics:
            metrics.log_metric("train_loss", loss.item(), step=step)
        if step % max(given["max_steps"] // 4, 1) == 0:
            weights, optimizer_state = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": optimizer_state}
            dcp.save(state, checkpoint_id=output / f"step_{step}")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    if main_rank:
        model.save_pretrained(output, state_dict=weights)
        tokenizer.save_pretrained(output)
    if metrics:
        metrics.end_run()


def sharded(given: dict) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The model, sharded block by block over all ranks, computed in bf16 on GPUs."""
    model = AutoModelForCausalLM.from_pretrained(given["model_name"]).to(DEVICE)
    model.config.use_cache = False
    model.gradient_checkpointing_enable()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if CUDA else MixedPrecisionPolicy()
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model, torch.optim.AdamW(model.parameters(), lr=given["learning_rate"])


def resumed(model: torch.nn.Module, optimizer: torch.optim.Optimizer, output: Path) -> int:
    """Load the newest checkpoint; its step, 0 without one. A complete one has .metadata."""
    step = max((int(path.parent.name[5:]) for path in output.glob("step_*/.metadata")), default=0)
    if step:
        weights, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=output / f"step_{step}")
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
    return step


def batches(tokenizer, given: dict, step: int):
    """Batches without an end, those before a step left out. Padding is not trained."""

    def tokens(row: dict) -> dict:
        context = f"### Input:\n{row['input']}\n\n" if row.get("input") else ""
        text = f"### Instruction:\n{row['instruction']}\n\n{context}### Response:\n{row['output']}"
        length = given["max_seq_len"]
        made = tokenizer(
            text + tokenizer.eos_token, truncation=True, max_length=length, padding="max_length"
        )
        names, mask = ("input_ids", "attention_mask"), made["attention_mask"]
        labels = [i if m else -100 for i, m in zip(made["input_ids"], mask, strict=True)]
        return {**{name: made[name] for name in names}, "labels": labels}

    data = load_dataset(given["dataset_name"], split="train")
    data = data.map(tokens, remove_columns=data.column_names).with_format("torch")
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, given["per_device_batch_size"], sampler=sampler, drop_last=True)
    skip, epoch = step * given["gradient_accumulation_steps"], 0
    while True:
        sampler.set_epoch(epoch)
        for place, batch in enumerate(loader, epoch * len(loader)):
            if place >= skip:
                yield batch
        epoch += 1


def tracked(parameters: dict):
    """MLflow with the workload's run going on; None without one."""
    run = os.environ.get("MLFLOW_RUN_ID")
    if not run:
        return None
    import mlflow

    mlflow.start_run(run_id=run)
    mlflow.log_params(parameters)
    return mlflow


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
