"""The transformers backend on GPUs that torch cannot use, or that are too small for a model."""

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plugins.serve import backends
from tests.trainer.parallel.test_device import gpu_node as gpu_node

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use a GPU here")


@pytest.fixture(scope="module")
def backend() -> Any:
    # Its imports take seconds.
    from plugins.serve import transformers_backend

    return transformers_backend


def test_it_does_not_answer_on_the_cpus_of_a_gpu_node(backend, gpu_node, monkeypatch):
    """Its environment has its own torch."""
    reason = backend.unusable(["m", "--device", "auto"])
    assert f"torch {torch.__version__} of" in reason
    monkeypatch.setattr(sys, "argv", ["", f"{gpu_node}/backend.sock", "m", "--device", "auto"])
    with pytest.raises(SystemExit):
        backend.main()
    # The replica gives it as the reason of its own end.
    assert (gpu_node / backends.REASON).read_text() == reason
    assert backend.unusable(["m", "--device", "cpu"]) == ""
    (gpu_node / "nvidia0").unlink()
    (gpu_node / "nvidia1").unlink()
    assert backend.unusable(["m", "--device", "auto"]) == ""


def test_a_served_model_is_not_offloaded_to_a_disk(backend, monkeypatch, tmp_path):
    """Of 2 x 79 GiB four fifths hold weights: 126 GiB, 68 billion parameters in bf16."""

    def whole(parameters: int) -> str:
        header = {"w": {"dtype": "BF16", "shape": [parameters], "data_offsets": [0, 0]}}
        text = json.dumps(header).encode()
        content = len(text).to_bytes(8, "little") + text
        (tmp_path / "model.safetensors").write_bytes(content)
        return backend.too_large([str(tmp_path), "--device", "auto", "--dtype", "auto"])

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    properties = SimpleNamespace(total_memory=79 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda each: properties)
    assert whole(67_000_000_000) == ""
    assert whole(70_600_000_000) == (
        f"{tmp_path} has 132 GiB of weights and needs 3 GPUs of 79 GiB, and there are 2: use "
        "--gpus-per-node 3, or larger GPUs"
    )
    assert backend.too_large([str(tmp_path), "--device", "cpu", "--dtype", "auto"]) == ""
    wide = backend.too_large([str(tmp_path), "--device", "auto", "--dtype", "float32"])
    assert "has 263 GiB of weights and needs 5 GPUs" in wide
    (tmp_path / "model.safetensors").unlink()
    assert backend.too_large([str(tmp_path), "--device", "auto", "--dtype", "auto"]) == ""
