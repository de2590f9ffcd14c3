"""A training script of one's own: a transformers model under FSDP2, resumable, in plain PyTorch.

Started by the kit on every rank (cookbook submit --recipe examples/transformers_fsdp/
transformers_fsdp.yaml), which gives it torchrun's environment and
  COOKBOOK_PARAMETERS  the recipe's parameters as a YAML file
  COOKBOOK_STOP_FILE   appears when the time limit is near: save, say so, and leave
  COOKBOOK_ATTEMPT     the number of this start
  RUN_DIR              where everything goes that is to stay
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

RUN = Path(os.environ["RUN_DIR"])
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if CUDA else torch.device("cpu")


def examples(given: dict, tokenizer) -> list[list[int]]:
    """Token ids of every question with its answer."""
    rows = [json.loads(line) for line in Path(given["dataset"]).read_text().splitlines()]
    turns = [
        [{"role": "user", "content": r["question"]}, {"role": "assistant", "content": r["answer"]}]
        for r in rows
    ]
    texts = [tokenizer.apply_chat_template(turn, tokenize=False) for turn in turns]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def batch(data: list[list[int]], step: int, given: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's tokens and labels of a step: the same ones whenever the step is done again."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(step))
    first = dist.get_rank() * given["batch_size"]
    rows = [torch.tensor(data[i]) for i in order[first : first + given["batch_size"]]]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    return tokens.to(DEVICE), labels.to(DEVICE)


def save(model, optimizer, step: int) -> None:
    """Write a checkpoint that is there whole, with its COMPLETE marker, or not at all."""
    folder = RUN / "checkpoints" / f"step_{step}"
    temporary = folder.with_name(f".tmp_{folder.name}")
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=temporary)
    if dist.get_rank() == 0:
        (temporary / "COMPLETE").touch()
        temporary.rename(folder)
    dist.barrier()


def resume(model, optimizer) -> int:
    """Load the newest checkpoint; return its step, 0 where there is none."""
    steps = [int(marker.parent.name[5:]) for marker in RUN.glob("checkpoints/step_*/COMPLETE")]
    if not steps:
        return 0
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=RUN / "checkpoints" / f"step_{max(steps)}")
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return max(steps)


def main() -> None:
    given = yaml.safe_load(Path(os.environ["COOKBOOK_PARAMETERS"]).read_text())
    if CUDA:
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("cuda:nccl,cpu:gloo" if CUDA else "gloo")
    main_rank = dist.get_rank() == 0

    tokenizer = AutoTokenizer.from_pretrained(given["model"])
    model = AutoModelForCausalLM.from_pretrained(given["model"]).to(DEVICE)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given["lr"])
    data = examples(given, tokenizer)
    step = resume(model, optimizer)

    while step < given["steps"]:
        tokens, labels = batch(data, step, given)
        loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        stop = torch.tensor(float(Path(os.environ["COOKBOOK_STOP_FILE"]).exists()))
        dist.all_reduce(stop)
        if main_rank:
            print(f"step {step}/{given['steps']}  loss {loss.item():.4f}", flush=True)
        if stop or step % given["save_every"] == 0 or step == given["steps"]:
            save(model, optimizer, step)
        if stop and step < given["steps"]:
            if main_rank:
                word = {"state": "stopped", "attempt": int(os.environ["COOKBOOK_ATTEMPT"])}
                (RUN / "progress.json").write_text(json.dumps(word))
            return

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    if main_rank:
        model.save_pretrained(RUN / "export", state_dict=weights)
        tokenizer.save_pretrained(RUN / "export")
        (RUN / "progress.json").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
