"""The step with the lowest val_loss is saved when it is measured, kept, and what a run exports."""

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.trainer.runs import ROOT, metrics, progress, train, write_config

QUESTIONS = ROOT / "configs/datasets/slurm_qa.jsonl"
WARM_UP = {
    "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
    "num_warmup_steps": 8,
}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_the_best_checkpoint_is_exported(ranks, tmp_path, model_folder, dataset):
    """A learning rate that grows far too high spoils the weights more and more."""
    paths = [
        write_config(
            tmp_path / name,
            model_folder,
            dataset,
            batch_size=8 // ranks,
            max_steps=8,
            optimizer={"_component_": "torch.optim.AdamW", "lr": 0.4},
            lr_scheduler=WARM_UP,
            dataset_val={"data_files": str(QUESTIONS), "split": "train[:8]"},
            run_val_every_n_steps=2,
            save_every_n_steps=3,
            keep_last_n_checkpoints=1,
            enable_async_checkpointing=True,
            export_checkpoint=choice,
        )
        for name, choice in (("best", None), ("last", "last"))
    ]
    output = train(*paths, ranks=ranks)
    losses = {m["step"]: m["val_loss"] for m in metrics(tmp_path / "best") if "val_loss" in m}
    best = min(losses, key=losses.get)
    assert list(losses) == [2, 4, 6, 8] and best != 8, losses
    told = (
        f"exporting step {best}: its val_loss {losses[best]:.4f} is the lowest of all validations"
    )
    assert output.count(told) == 1
    # No checkpoint is saved for its val_loss if the last step is asked for; the last one has one.
    for name, exported, known in (("best", best, best), ("last", 8, 8)):
        found = progress(tmp_path / name)
        assert (found["best_step"], found["best_val_loss"]) == (known, losses[known])
        folder = tmp_path / name / "checkpoints"
        kept = {f"step_{known}", "step_8"}
        assert {path.name for path in folder.iterdir()} == kept
        dcp_to_torch_save(folder / f"step_{exported}", tmp_path / "whole.pt")
        saved = torch.load(tmp_path / "whole.pt", weights_only=True)["model"]
        export = load_file(tmp_path / name / "export/model.safetensors")
        for own, hugging_face in (
            ("norm.scale", "model.norm.weight"),
            ("tok_embeddings.weight", "model.embed_tokens.weight"),
            ("layers.2.mlp.w1.weight", "model.layers.2.mlp.gate_proj.weight"),
        ):
            assert torch.equal(export[hugging_face], saved[own])
