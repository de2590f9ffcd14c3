"""A dataset's tokens on disk: made once, by any number of ranks, and read by those that follow."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from trainer.config import instantiate, load
from trainer.data import tokenised
from trainer.data.source import Source
from trainer.errors import ConfigError
from trainer.parallel import world as distributed


def test_a_second_start_reads_what_the_first_has_made(build, dataset, tmp_path, monkeypatch):
    copy, cache = tmp_path / "copy.jsonl", tmp_path / "cache"
    copy.write_bytes(dataset.read_bytes())
    changes = {"dataset": {"data_files": str(copy)}, "data_cache_dir": str(cache)}
    first = build(**changes).training.rows.samples
    folders = {first.folder}
    assert {p for p in cache.iterdir()} == folders
    with monkeypatch.context() as patch:
        patch.setattr(tokenised, "make", lambda *_: pytest.fail("tokenised a second time"))
        # Neither packing nor another run directory makes other tokens.
        again = build(**changes, batch_size=3).training.rows.samples
        assert again.folder == first.folder and again.sha256 == first.sha256
    for changed in ({"tokenizer": {"max_seq_len": 20}}, {"dataset": {"train_on_input": True}}):
        merged = {key: changes.get(key, {}) | value for key, value in changed.items()}
        folders.add(build(**changes | merged).training.rows.samples.folder)
    copy.write_bytes(dataset.read_bytes() + b'{"question": "one more?", "answer": "yes"}\n')
    more = build(**changes).training.rows.samples
    assert len(more) == len(first) + 1 and more.sha256 != first.sha256
    assert {p for p in cache.iterdir()} == folders | {more.folder} and len(folders) == 3

    tokens = next(more.folder.glob("tokens_*.bin"))
    tokens.write_bytes(tokens.read_bytes()[:-4])
    with pytest.raises(ConfigError, match=r"tokens_0\.bin is damaged; delete its folder"):
        build(**changes)


def test_the_slower_of_two_runs_takes_the_quicker_ones_folder(build, tmp_path, world):
    cache = tmp_path / "cache"
    folder = build(data_cache_dir=str(cache)).training.rows.samples.folder
    before = (folder / "meta.json").stat().st_mtime_ns
    config = load(tmp_path / "run/train.yaml")
    tokenizer = instantiate("tokenizer", config.tokenizer)
    tokenised.make(Source("dataset", config.dataset, tokenizer), folder, world)
    assert list(cache.iterdir()) == [folder]
    assert (folder / "meta.json").stat().st_mtime_ns == before


@dataclass(frozen=True)
class OfThreads(distributed.World):
    """A rank that is a thread."""

    meet: threading.Barrier = field(default_factory=lambda: threading.Barrier(1))
    values: list[Any] = field(default_factory=list)

    def gather(self, value: Any) -> list[Any]:
        self.values[self.rank] = value
        self.meet.wait(60)
        values = list(self.values)
        self.meet.wait(60)
        return values

    def from_main(self, task: Any) -> Any:
        return self.gather(self.on_main(task))[0]


# More ranks than tokenise, and one of those without a sample.
RANKS, WRITERS, SAMPLES = 8, 6, 5


def test_what_many_ranks_have_tokenised_is_in_few_files(build, tmp_path, world, monkeypatch):
    few = {"dataset": {"split": f"train[:{SAMPLES}]"}}
    wanted = build(data_cache_dir=str(tmp_path / "one"), **few).training.rows.samples
    assert len(wanted) == SAMPLES
    folder = tmp_path / "many" / wanted.folder.name
    monkeypatch.setattr(tokenised, "WRITERS", WRITERS)
    config = load(tmp_path / "run/train.yaml")
    meet, values = threading.Barrier(RANKS), [None] * RANKS
    tokenizer = instantiate("tokenizer", config.tokenizer)
    # transformers keeps one compiled chat template per process, which only one thread may use.
    lock, tokens_of = threading.Lock(), type(tokenizer).tokenize_turns

    def by_one_thread(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return tokens_of(*args, **kwargs)

    monkeypatch.setattr(type(tokenizer), "tokenize_turns", by_one_thread)

    def tokenise(rank: int) -> None:
        own = {name: getattr(world, name) for name in ("local_rank", "device", "cpu_group")}
        of_threads = OfThreads(rank, RANKS, **own, layout=world.layout, meet=meet, values=values)
        tokenised.make(Source("dataset", config.dataset, tokenizer), folder, of_threads)

    with ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(tokenise, range(RANKS)))
    sizes = [path.stat().st_size for path in folder.glob("tokens_*.bin")]
    assert sum(sizes) == 4 * wanted.lengths.sum() and len(sizes) == SAMPLES
    assert {path.name for path in folder.iterdir() if path.suffix != ".bin"} == {
        "meta.json",
        "samples.npy",
    }
    monkeypatch.setattr(tokenised, "make", lambda *_: pytest.fail("tokenised again"))
    found = build(data_cache_dir=str(folder.parent), **few).training.rows.samples
    assert found.sha256 == wanted.sha256 and found.highest.tolist() == wanted.highest.tolist()
    for index in range(SAMPLES):
        for own, other in zip(found[index], wanted[index], strict=True):
            assert np.array_equal(own, other)
