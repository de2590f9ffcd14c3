"""The shape of a model: shipped, kept, or asked of the trainer once."""

import json

import pytest

from launcher.errors import RecipeFault
from plugins.estimate.launcher import shapes
from plugins.estimate.launcher.shapes import shape_of
from tests.model_sizes import MIXTRAL

pytestmark = pytest.mark.usefixtures("fast_trainer")


def test_the_trainer_is_asked_once_for_a_model_that_is_not_shipped(tmp_path, monkeypatch):
    """Of a class that no description has; its MLP has two matrices."""
    folder, cache = tmp_path / "mine", tmp_path / "cache"
    folder.mkdir()
    sizes = {key: MIXTRAL[key] for key in MIXTRAL if key.startswith(("num_hidden", "vocab", "max"))}
    config = {"model_type": "arcee", "hidden_size": 128, "intermediate_size": 512, **sizes}
    (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": 4}))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    shape = shape_of({}, folder)
    assert shape.parameters == 32 * (4 * 128**2 + 2 * 128 * 512 + 256) + 2 * 32000 * 128 + 128
    assert shape.names.keys() >= {"self_attn.q_proj", "mlp.up_proj", "mlp.down_proj"}
    (kept,) = (cache / "slurm-cookbook" / "models").iterdir()
    assert kept.name.startswith("mine-") and json.loads(kept.read_text())["packages"]
    monkeypatch.setattr(shapes, "_told", {})
    monkeypatch.setenv("COOKBOOK_VENV", str(tmp_path / "none"))
    assert shape_of({"lora_rank": 4}, folder) == shape
    # What another version of the kit has kept is not read.
    kept.write_text(kept.read_text().replace('"vectors"', '"of_old": 1, "vectors"', 1))
    monkeypatch.setattr(shapes, "_told", {})
    with pytest.raises(RecipeFault, match="no description of mine is"):
        shape_of({}, folder)
    # Without a virtual environment there is nobody to ask, but for what is shipped.
    (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": 8}))
    with pytest.raises(RecipeFault, match=r"no description of mine is .*: bash setup.sh"):
        shape_of({}, folder)
    assert shape_of({}, tmp_path / "Qwen3-8B").parameters == 8_190_735_360
    with pytest.raises(RecipeFault, match=r"none has no config.json.*: cookbook download"):
        shape_of({}, tmp_path / "none")
