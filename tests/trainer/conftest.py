"""The model and the data of the trainer's tests, made once."""

import io
import json
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer import demo
from trainer.config import load, read_yaml
from trainer.data import batches
from trainer.data.batches import Data
from trainer.parallel import world as distributed

# Their assertions then show the numbers that differ, as those of a test file do.
pytest.register_assert_rewrite("tests.trainer.runs", "tests.trainer.models.transformers_runs")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models so small are slower on several threads, and much slower on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Descriptions that the launcher keeps are the session's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """44 questions and answers of uneven length: no batch size of the tests divides them."""
    path = tmp_path_factory.mktemp("data") / "qa.jsonl"
    topics = ("node", "queue", "partition", "checkpoint", "rank", "GPU", "log", "script")
    rows = [
        {
            "question": f"What is {topic} number {index}?",
            "answer": f"The {topic} {index} is " + "very " * (index * 7 % 11) + f"{topic}-like.",
        }
        for index in range(44)
        for topic in [topics[index % len(topics)]]
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model of seed 0, its tokenizer trained on the demo's dataset."""
    folder = tmp_path_factory.mktemp("model") / "demo-llama"
    demo.make(folder, ROOT / "configs/datasets/slurm_qa.jsonl", seed=0)
    return folder


@pytest.fixture(scope="module")
def world() -> Iterator[distributed.World]:
    yield distributed.start("cpu")
    distributed.stop()


@pytest.fixture
def build(tmp_path: Path, model_folder: Path, dataset: Path, world: distributed.World) -> Any:
    """Build the data of a config; keys that hold a block are merged into the default's."""

    # Not at the top: its assertions are rewritten by then.
    from tests.trainer.runs import write_config

    def with_changes(**changes: Any) -> Data:
        path = write_config(tmp_path / "run", model_folder, dataset)
        content = json.loads(json.dumps(read_yaml(path)))
        for key, value in changes.items():
            merge = isinstance(value, dict) and "_component_" not in value
            content[key] = content.get(key, {}) | value if merge else value
        path.write_text(json.dumps(content))
        with redirect_stdout(io.StringIO()) as said:
            found = batches.build(load(path), world)
        with_changes.said = said.getvalue().splitlines()
        return found

    return with_changes
