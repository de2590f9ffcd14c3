"""What the model sees of a dataset: tokens, masks, packed rows, their order, and their cache."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from runspec.layout import Layout
from tests.trainer.models.transformers_cases import reference, write
from tests.trainer.runs import write_config
from trainer.config import load
from trainer.data import origin
from trainer.data.batches import Batches, BatchSpec, MicroBatch
from trainer.data.packing import WINDOW, pack
from trainer.data.preferences import UnpairedPreferenceDataset
from trainer.data.rows import Rows
from trainer.data.tokenizers import hugging_face_tokenizer
from trainer.errors import ConfigError
from trainer.layers import attention
from trainer.layers.batch import IGNORE_INDEX
from trainer.models import build as models
from trainer.parallel import world as distributed

ROW = 96


def packed(**changes: Any) -> dict[str, Any]:
    return {"dataset": {"packed": True}, "tokenizer": {"max_seq_len": ROW}} | changes


def steps(batches: Batches, first: int = 0) -> list[MicroBatch]:
    return [batch for micro_batches in batches.from_step(first) for batch in micro_batches]


# Packing


def test_every_sample_is_in_one_row_and_rows_are_full():
    lengths = np.random.default_rng(0).integers(1, 700, size=WINDOW + 500)
    rows = pack(lengths, 1000, seed=1)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    sums = [int(lengths[row].sum()) for row in rows]
    assert max(sums) <= 1000
    assert lengths.sum() / (1000 * len(rows)) > 0.97
    assert rows == pack(lengths, 1000, seed=1) != pack(lengths, 1000, seed=2)
    assert pack(np.array([5, 5, 5]), 10, None) == [[0, 1], [2]]


@pytest.mark.parametrize("family", ["llama3", "gemma2"])
def test_packed_documents_have_the_losses_of_unpacked_ones(
    family, build, tmp_path, model_folder, dataset, world
):
    """Against transformers' own attention, sample by sample."""
    rows = build(**packed(shuffle=False)).training.rows
    assert 1 < len(rows) < len(rows.samples), "rows must hold several samples"
    folder = write(family, tmp_path / "model", model_folder)
    theirs = reference(folder).eval()
    expected = {}
    with torch.inference_mode():
        for tokens, trained in rows.samples:
            row = torch.from_numpy(tokens.astype(np.int64))
            logits = theirs(row.unsqueeze(0)).logits[0, :-1]
            losses = F.cross_entropy(logits, row[1:], reduction="none")
            expected[tokens.tobytes()] = losses[torch.from_numpy(trained[1:])]
    model = models.build(load(write_config(tmp_path / "own", folder, dataset)), world).module
    model.eval()
    seen = 0
    for with_flex_attention in (False, True):
        if with_flex_attention:
            attention.use_flex_attention(model, torch.device("cpu"))
        for index in range(len(rows)):
            batch = rows.collate([rows[index]])
            with torch.inference_mode():
                logits = model(batch.inputs)
            losses = F.cross_entropy(logits[0], batch.labels[0], reduction="none")
            for number, (tokens, _) in enumerate(rows[index].documents):
                own = (batch.inputs.documents.ids[0] == number) & (batch.labels[0] != IGNORE_INDEX)
                wanted = expected[tokens.tobytes()]
                torch.testing.assert_close(losses[own], wanted, rtol=0, atol=1e-5)
                seen += 1
    assert seen == 2 * len(rows.samples) == 2 * 44


# The order of batches


@pytest.mark.parametrize("changes", [{}, packed()], ids=["unpacked", "packed"])
def test_workers_and_a_later_start_give_the_same_batches(changes, build, world):
    here = build(**changes, gradient_accumulation_steps=2, batch_size=4).training
    there = build(**changes, gradient_accumulation_steps=2, batch_size=4, num_workers=2).training
    whole = steps(here)
    assert len(whole) == 12
    for batch, own in zip(whole, steps(there), strict=True):
        assert_same(batch, own)
    for batch, own in zip(whole[6:], steps(here, first=3), strict=True):
        assert_same(batch, own)


def assert_same(batch: MicroBatch, own: MicroBatch) -> None:
    assert torch.equal(batch.labels, own.labels)
    found, wanted = batch.inputs, own.inputs
    assert torch.equal(found.tokens, wanted.tokens)
    assert (found.documents is None) == (wanted.documents is None)
    if found.documents is not None:
        assert torch.equal(found.positions, wanted.positions)
        assert all(map(torch.equal, found.documents, wanted.documents))


@pytest.mark.parametrize("changes", [{}, packed()], ids=["unpacked", "packed"])
def test_an_epoch_holds_each_sample_once_on_any_number_of_ranks(changes, build):
    rows = build(**changes).training.rows
    wanted = sorted(tokens.tobytes() for tokens, _ in rows.samples)
    for ranks in (1, 3):
        found = []
        for rank in range(ranks):
            layout = Layout(shard=ranks)
            part = distributed.World(rank, ranks, rank, torch.device("cpu"), None, layout)
            batches = list(Batches(rows, part, BatchSpec(4, seed=5))._index_lists(0))
            assert {len(indices) for indices in batches} == {4}, "every batch has one shape"
            order = [index for indices in batches for index in indices]
            found += [t.tobytes() for i in order if i >= 0 for t, _ in rows[i].documents]
        assert sorted(found) == wanted


def test_prompts_that_fill_no_step_wait_for_another_epoch(build):
    rows = build(**packed()).training.rows
    alone = distributed.World(0, 1, 0, torch.device("cpu"), None, Layout())
    size = len(rows) - 1
    spec = BatchSpec(size, seed=5, epochs=2)
    kept, dropped = (Batches(rows, alone, replace(spec, drops_rest=d)) for d in (False, True))
    assert (kept.steps_per_epoch, kept.total_steps) == (2, 4)
    assert (dropped.steps_per_epoch, dropped.total_steps) == (1, 2)
    epochs = [set(indices) for indices in dropped._index_lists(0)]
    assert [len(epoch) for epoch in epochs] == [size, size] and epochs[0] != epochs[1]
    # The only step of an epoch is not left out.
    assert Batches(rows, alone, BatchSpec(size + 5, drops_rest=True)).steps_per_epoch == 1


# Kinds of datasets


PAIR = {"question": "What is a queue?", "answer": "A line."}


def test_plain_text_needs_no_chat_template(model_folder, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((model_folder / "tokenizer.json").read_bytes())
    tokenizer = hugging_face_tokenizer(str(tmp_path))
    assert tokenizer.encode("a rank", add_bos=True) == tokenizer.encode("a rank")
    with pytest.raises(ConfigError, match=r"no eos_token; set dataset\.add_eos=False"):
        tokenizer.encode("a rank", add_eos=True)
    with pytest.raises(ConfigError, match="has no chat template"):
        tokenizer.render([{"role": "user", "content": "a"}])


# The cache


def test_a_failed_start_leaves_nothing_behind(build, tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [PAIR, PAIR, {"question": "What?", "answer": None}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(
        ConfigError, match=r"^dataset: .*/rows\.jsonl, line 3: there is no 'answer'$"
    ):
        build(dataset={"data_files": str(path)}, data_cache_dir=str(tmp_path / "cache"))
    assert list((tmp_path / "cache").iterdir()) == []
    with pytest.raises(ConfigError, match=r"data_cache_dir: .*rows\.jsonl cannot be written to"):
        build(data_cache_dir=str(path))


# Faults


def test_samples_that_do_not_fit_the_model_are_named(build, tmp_path):
    found = build()
    lengths = found.training.rows.samples.lengths
    assert found.faults(1024, 512) == []
    long, unknown = found.faults(300, 30)
    origin = load(tmp_path / "run/train.yaml").dataset["data_files"]
    assert long == (
        f"dataset: {(lengths > 30).sum()} of 44 samples are too long: "
        f"{origin}, line {lengths.argmax() + 1} has {lengths.max()} tokens, "
        "the model takes 30; set tokenizer.max_seq_len=30"
    )
    assert unknown.startswith("tokenizer: it made token ") and "the model knows 300" in unknown
    (fault,) = build(**packed()).faults(1024, 64)
    assert fault == (
        "dataset.packed: rows of 96 tokens, the model takes 64; set tokenizer.max_seq_len=64"
    )


def test_samples_without_a_target_are_counted(build):
    samples = build().training.rows.samples
    begins = sorted(int(trained.argmax()) for _, trained in samples)
    build(tokenizer={"max_seq_len": begins[-1]})
    note, longer = build.said
    count = begins.count(begins[-1])
    assert note.startswith(f"note: dataset: {count} of 44 samples hold no token to train on")
    assert f"44 of 44 samples are longer than tokenizer.max_seq_len={begins[-1]}: they" in longer


@pytest.mark.parametrize(
    ("splits", "fault"),
    [
        (("train", "train[95%:]"), "each of its samples is in dataset too"),
        (("train[:50%]", "train[40:]"), None),
        (("train[:40]", "train[100%:]"), r"dataset_val: .*corresponds to no data"),
        (("train[:40]", "vald"), "Unknown split"),
    ],
    ids=["whole", "apart", "empty", "unknown"],
)
def test_validation_data_must_be_apart(splits, fault, build):
    changes = {"dataset": {"split": splits[0]}, "dataset_val": {"split": splits[1]}}
    if fault is None:
        found = build(**changes)
        assert (len(found.training.rows), len(found.validation.rows)) == (22, 4)
    else:
        with pytest.raises(ConfigError, match=fault):
            build(**changes)


def test_a_copy_of_the_data_is_no_validation_data(build, dataset, tmp_path):
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(dataset.read_bytes())
    with pytest.raises(ConfigError, match="each of its samples is in dataset too"):
        build(dataset_val={"data_files": str(copy)})
    lines = dataset.read_text().splitlines(keepends=True)
    copy.write_text("".join(lines[:3]) + json.dumps(PAIR) + "\n")
    build(dataset_val={"data_files": str(copy)})
    assert build.said == ["note: dataset_val: 3 of 4 samples are the same as samples of dataset"]


def test_a_sample_is_named_by_file_and_line(tmp_path):
    path, table = tmp_path / "rows.jsonl", tmp_path / "rows.csv"
    # With a byte order mark, and with a separator within a text, which is no end of a line.
    rows = '{"a": "one\u2028"}\n\n{"a": "two", "b": null}\n{"a": 3}\n'
    path.write_text(rows, encoding="utf-8-sig")
    table.write_text('a,b\n"one\nline",1\ntwo,2\n')
    block = {"source": "json", "data_files": str(path)}
    assert origin.of_sample(block, 1) == f"{path}, line 3"
    part = block | {"split": "train[1:]"}
    assert origin.of_sample(part, 0, {"a": "two", "b": None}) == f"{path}, line 3"
    assert origin.of_sample(part, 0) == "json, split train[1:], sample 0 (counted from 0)"
    assert origin.of_sample({"source": "csv", "data_files": str(table)}, 1) == f"{table}, line 4"
    assert origin.broken_line(block) == f"{path}, line 4: 'a' is a number, before it was str"
    path.write_text('{"a": "one"}\n{"a": "tw\n')
    assert str(origin.broken_line(block)).startswith(f"{path}, line 2: not JSON: ")


# What pandas, and so the library `datasets`, makes numbers, truth values or nothing of.
CELLS = ("None", "NA", "null", "nan", "N/A", "00042", "1.10", "1e3", "True", "-", "#N/A", "inf")


@pytest.mark.parametrize(
    ("cells", "between"),
    [
        *((CELLS, between) for between in (",", ";", "\t")),
        *(((cell, cell), ",") for cell in CELLS),
        *((cells, ",") for cells in (("0", "1"), ("1", "2.5"), ("True", "False"))),
    ],
    ids=str,
)
def test_a_cell_holds_the_text_that_stands_in_the_file(cells, between, tmp_path):
    path = tmp_path / "rows.csv"
    rows = [f"case {n}{between}{cell}\n" for n, cell in enumerate(cells)]
    path.write_text(f"question{between}answer\n" + "".join(rows) + f"empty{between}\n")
    read = Rows(source="csv", data_files=str(path), cache_dir=str(tmp_path / "cache"))
    assert [read.row(n)["answer"] for n in range(len(read))] == [*cells, None]
    assert origin.of_sample({"source": "csv", "data_files": str(path)}, 1, read.row(1)) == (
        f"{path}, line 3"
    )


def test_a_tables_labels_are_read_as_truth_values(tmp_path, model_folder):
    path = tmp_path / "rows.csv"
    lines = [f"q{n},a{n},{label}\n" for n, label in enumerate(("1", "0", "True", "false"))]
    path.write_text("prompt,completion,label\n" + "".join(lines))
    tokenizer = hugging_face_tokenizer(str(model_folder))
    read = UnpairedPreferenceDataset(tokenizer, source="csv", data_files=str(path), split="train")
    assert [read[n]["desirable"] for n in range(4)] == [1.0, 0.0, 1.0, 0.0]
