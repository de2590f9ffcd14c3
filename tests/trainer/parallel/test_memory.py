"""What saves memory: inputs of layers on the CPU, and optimizers of 8 bits."""

import weakref
from functools import partial

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from tests.trainer.runs import curve, kill_at, metrics, train, write_config
from trainer.parallel.activations import InputOffloading


class Layer(torch.nn.Module):
    """A layer that takes a tensor which nothing else needs."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((8, 8), 0.1 * step))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


def test_offloaded_inputs_are_let_go_and_come_back():
    class Alive(TorchFunctionMode):
        """Notes every tensor that the layers make, without keeping it."""

        def __torch_function__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            if function is torch.tanh:
                inputs.append(weakref.ref(made))
            return made

    found = []
    for checkpointing in (partial(checkpoint, use_reentrant=False), InputOffloading()):
        layers = [Layer(step) for step in range(1, 5)]
        x, inputs = torch.ones(4, 8, requires_grad=True), []
        with Alive():
            out = x
            for layer in layers:
                out = checkpointing(layer, out)
        kept = sum(made() is not None for made in inputs[:-1])
        out.sum().backward()
        found.append((kept, [layer.weight.grad for layer in layers]))
    (kept, gradients), (offloaded, same_gradients) = found
    assert (kept, offloaded) == (3, 0)
    for gradient, same in zip(gradients, same_gradients, strict=True):
        assert torch.equal(gradient, same)


@pytest.mark.long
def test_a_killed_run_in_8_bits_goes_on_the_same_and_trains_nearly_as_in_32(
    tmp_path, model_folder, dataset, monkeypatch
):
    # torchao compiles its optimizers, which takes long and is not what is tested.
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    cosine = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
    whole, killed, exact = (
        write_config(
            tmp_path / name,
            model_folder,
            dataset,
            batch_size=4,
            max_steps=10,
            save_every_n_steps=2,
            optimizer={"_component_": optimizer, "lr": 3e-3},
            lr_scheduler={"_component_": cosine, "num_warmup_steps": 2},
        )
        for name, optimizer in (
            ("whole", "torchao.optim.AdamW8bit"),
            ("killed", "torchao.optim.AdamW8bit"),
            ("exact", "torch.optim.AdamW"),
        )
    )
    train(whole, exact, ranks=2)
    kill_at(killed, 5, ranks=2)
    assert "resuming from checkpoints/step_" in train(killed, ranks=2, attempt=1)
    assert curve(killed.parent) == curve(whole.parent)
    export = "export/model.safetensors"
    assert (killed.parent / export).read_bytes() == (whole.parent / export).read_bytes()
    eight, wanted = ([line["loss"] for line in metrics(p.parent)] for p in (whole, exact))
    assert eight == pytest.approx(wanted, abs=0.05) and eight[-1] < eight[0] - 0.5
