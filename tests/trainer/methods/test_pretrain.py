"""Pre-training from a stream and from scratch: every token once, every layout, every resume."""

import json
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pyarrow import Table, parquet
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, get_wsd_schedule

from launcher.check import files
from runspec.keys.fields import STREAM
from runspec.keys.pretrain import PretrainConfig
from tests.trainer.runs import (
    curve,
    finish,
    kill_at,
    metrics,
    start,
    write_config,
)
from trainer import check
from trainer.config import load, read_yaml
from trainer.data import logical, shards, stream
from trainer.data.preview import previews
from trainer.errors import ConfigError
from trainer.methods.pretrain import Pretraining
from trainer.models import build as models
from trainer.parallel import world as distributed

LENGTH = 48
ADAMW = {"_component_": "torch.optim.AdamW", "lr": 3e-3}
WSD = {"_component_": "transformers.get_wsd_schedule", "num_warmup_steps": 2, "num_decay_steps": 2}
WORDS = ("node", "queue", "partition", "checkpoint", "rank", "GPU", "log", "script")


def document(kind: str, number: int) -> str:
    count = 2 + number * 7 % 23 + (90 if number % 11 == 0 else 0)
    return f"{kind} {number}: " + " ".join(WORDS[(number + i) % 8] for i in range(count))


CORPUS = {kind: [document(kind, n) for n in range(60)] for kind in ("web", "code", "books")}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Three sources: small row groups in two files, an empty text in another column, one group."""
    folder = tmp_path_factory.mktemp("corpus")
    for part in range(2):
        write_texts(folder / f"web-{part}.parquet", CORPUS["web"][part::2], row_group_size=8)
    write_texts(folder / "code.parquet", [*CORPUS["code"], ""], column="content")
    write_texts(folder / "books.parquet", CORPUS["books"])
    return folder


def write_texts(path: Path, texts: list[str], column: str = "text", **options: Any) -> Path:
    parquet.write_table(Table.from_pydict({column: texts}), path, **options)
    return path


@pytest.fixture(scope="module")
def sources(corpus):
    return [
        {"name": "web", "data_files": str(corpus / "web-*.parquet"), "weight": 0.6},
        {"name": "code", "data_files": str(corpus / "code.parquet"), "column": "content"},
        {"name": "books", "data_files": str(corpus / "books.parquet"), "weight": 0.4},
    ]


@pytest.fixture(scope="module")
def empty_folder(tmp_path_factory, model_folder):
    """A model folder without weights."""
    folder = tmp_path_factory.mktemp("scratch") / "llama"
    shutil.copytree(model_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def config(folder: Path, model: Path, sources: list[dict[str, Any]], **changes: Any) -> Path:
    standard = {
        "model": None,
        "from_scratch": True,
        "z_loss": 1e-3,
        "batch_size": 4,
        "max_steps": 6,
        "epochs": None,
        "save_every_n_steps": 2,
        "optimizer": ADAMW | {"weight_decay": 0.1},
        "lr_scheduler": WSD,
        "data_cache_dir": str(folder.parent / "tokens"),
    }
    path = write_config(folder, model, Path("unused"), row_length=LENGTH, **standard | changes)
    content = yaml.safe_load(path.read_text())
    content["dataset"] = {"_component_": STREAM, "sources": sources}
    path.write_text(yaml.safe_dump(content))
    return path


def pretrain(path: Path, ranks: int = 1, attempt: int = 0, status: int = 0) -> str:
    return finish(start(path, ranks, attempt, module="trainer.train pretrain"), status)


def built(path: Path) -> tuple[PretrainConfig, stream.StreamBatches]:
    found = load(path, PretrainConfig)
    world = distributed.start("cpu")
    try:
        return found, stream.build(found, world).training
    finally:
        distributed.stop()


@pytest.fixture(scope="module")
def one(tmp_path_factory, empty_folder, sources):
    """The run of one process that all others must equal."""
    folder = tmp_path_factory.mktemp("pretrain") / "one"
    output = pretrain(config(folder, empty_folder, sources))
    assert "50 % code, 30 % web" in output.replace("30 % web, 50 % code", "50 % code, 30 % web")
    return folder


# The stream -------------------------------------------------------------------------------------


def documents_of(rows: list[Any], begin: int, end: int) -> list[list[int]]:
    """The documents of a stream's rows, put together again; the last one may lack its end."""
    found: list[list[int]] = []
    for tokens in (piece.tolist() for row in rows for piece, _ in row.documents):
        if tokens[0] == begin:
            assert not found or found[-1][-1] == end, "a document ends before the next one begins"
            found.append(tokens)
        else:
            assert tokens[0] == found[-1][-1], "it goes on with its last token"
            found[-1] += tokens[1:]
    return found


@pytest.mark.parametrize("streams", [1, 4, 16])
def test_every_document_is_read_once_in_each_pass(streams, sources, empty_folder, tmp_path):
    for seed in (None, 3):
        for block, texts in zip(sources, CORPUS.values(), strict=True):
            (source,) = stream.stream_dataset(None, sources=[block]).sources
            parts = shards.parts_of(source.files, streams)
            mixture = logical.Mixture([source], [parts], None, 0, seed, streams, 0)
            order = []
            for number in range(streams):
                cursor = logical.Cursor(mixture, 0, number, [0, 0, 0])
                order.append([])
                while True:
                    text = cursor.text()
                    if cursor.place[0]:
                        break
                    order[-1].append(text)
                    cursor.advance()
            assert Counter(t for texts in order for t in texts) == Counter(texts)
            if streams == 1 and source.name == "code":
                assert (order[0] == texts) == (seed is None)


def test_long_documents_go_on_and_no_token_is_lost(empty_folder, sources, tmp_path):
    path = config(tmp_path / "run", empty_folder, sources[:1], shuffle=False)
    _, data = built(path)
    tokenizer = data.mixture.tokenizer
    wanted = Counter(tuple(logical.encoded(tokenizer, text)) for text in CORPUS["web"])
    assert max(map(len, wanted)) > 2 * LENGTH
    read = Counter[tuple[int, ...]]()
    for number in data.own:
        rows = logical.RowStream(data.mixture, number, data.mixture.start(number))
        made = [rows.row() for _ in range(60)]
        assert all(sum(len(p) for p, _ in row.documents) >= LENGTH - 1 for row in made)
        documents = documents_of(made, tokenizer.bos_id, tokenizer.eos_id)
        period = next(n for n, d in enumerate(documents[1:], 1) if d == documents[0])
        read += Counter(map(tuple, documents[:period]))
    assert read == wanted


def test_tokens_come_by_weight(empty_folder, sources, tmp_path):
    _, data = built(config(tmp_path / "run", empty_folder, sources))
    total = torch.zeros(3)
    for number in data.own:
        rows = logical.RowStream(data.mixture, number, data.mixture.start(number))
        for _ in range(200):
            rows.row()
        total += torch.tensor(rows.state["taken"])
    shares = total / total.sum()
    torch.testing.assert_close(shares, torch.tensor([0.3, 0.5, 0.2]), atol=0.01, rtol=0)


def test_what_is_wrong_with_sources_is_said(corpus, empty_folder, tmp_path):
    (tmp_path / "a.bin").write_text("x")
    write_texts(tmp_path / "other.parquet", ["a b c"], column="content")
    write_texts(tmp_path / "few.parquet", ["one document"])
    with pytest.raises(ConfigError) as error:
        stream.stream_dataset(
            None,
            sources=[
                {"data_files": str(tmp_path / "absent*")},
                {"data_files": str(tmp_path / "a.bin")},
                {"column": "text"},
                {"data_files": str(corpus), "weight": 0},
                {"data_files": str(corpus), "split": "train"},
            ],
        )
    assert [fault.partition(":")[0] for fault in error.value.faults] == [
        "dataset.sources.0.data_files",
        "dataset.sources.1.data_files",
        "dataset.sources.2",
        "dataset.sources.3.weight",
        "dataset.sources.4.split",
    ]
    for number, (name, words) in enumerate(
        {
            "other.parquet": "there is no column 'text', only content",
            "few.parquet": "too few documents for 4 rows per step",
        }.items()
    ):
        own = [{"data_files": str(tmp_path / name)}]
        path = config(tmp_path / f"run{number}", empty_folder, own)
        for workers in (0, 2):
            _, data = built(path)
            data._workers = workers
            with pytest.raises(ConfigError, match=words):
                list(data.from_step(0))
    path = config(tmp_path / "none", empty_folder, [], max_steps=None)
    with pytest.raises(ConfigError, match="max_steps: a stream has no end"):
        load(path, PretrainConfig)
    path = config(tmp_path / "val", empty_folder, [], dataset_val={"split": "test"})
    with pytest.raises(ConfigError, match="is measured whole"):
        load(path, PretrainConfig)
    with pytest.raises(ConfigError, match="only entry: pretrain trains on a stream"):
        load(config(tmp_path / "sft", empty_folder, [], from_scratch=None, z_loss=None))


def test_a_token_without_a_row_is_refused_where_a_text_has_it_only(empty_folder, sources, tmp_path):
    """As Gemma 3 1B's tokenizer has one for images, whose number is the model's vocab_size."""
    folder = tmp_path / "model"
    shutil.copytree(empty_folder, folder)
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    unused = [f"<unused{n}>" for n in range(rows - tokenizer.get_vocab_size())]
    tokenizer.add_special_tokens([*unused, "<image_soft_token>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    path = config(tmp_path / "run", folder, sources)
    assert check.faults(read_yaml(path), Pretraining) == []
    found, data = built(path)
    assert len(list(data.from_step(0))) == found.max_steps
    texts = ["a document", "an <image_soft_token> here"] * 9
    own = [{"data_files": str(write_texts(tmp_path / "more.parquet", texts))}]
    _, data = built(config(tmp_path / "run2", folder, own))
    with pytest.raises(
        ConfigError, match=rf"more.parquet has token {rows} .<image_soft_token>.*knows"
    ):
        list(data.from_step(0))


# Runs -------------------------------------------------------------------------------------------


def test_its_losses_equal_a_plain_loops(one, empty_folder, sources, tmp_path):
    """transformers' model, AdamW and schedule; each part of a document is a row of its own."""
    found, data = built(config(tmp_path / "run", empty_folder, sources))
    model = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(empty_folder))
    fresh = models.empty(found)
    first = {fresh.hub_name(name): value for name, value in fresh.first_values(found.seed)}
    assert not model.load_state_dict(first, strict=False).unexpected_keys
    embedding, norm = first["model.embed_tokens.weight"], first["model.norm.weight"]
    assert embedding.std() == pytest.approx(0.02, rel=0.02) and norm.eq(1).all()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = get_wsd_schedule(optimizer, 2, 2, num_training_steps=6)
    for line, (batch,) in zip(metrics(one), data.from_step(0), strict=True):
        total, z_term, ends = (
            torch.zeros(()),
            torch.zeros(()),
            batch.inputs.documents.cu_seqlens.tolist(),
        )
        tokens, labels = batch.inputs.tokens.flatten(), batch.labels.flatten()
        for begin, end in pairwise(ends):
            targets = labels[begin:end]
            if (targets >= 0).any():
                assert targets[:-1].equal(tokens[begin + 1 : end]) and targets[-1] == -100
                logits = model(tokens[None, begin:end]).logits[0, :-1]
                total += torch.nn.functional.cross_entropy(logits, targets[:-1], reduction="sum")
                z_term += 1e-3 * logits.logsumexp(-1).square().sum()
        count = batch.target_count
        ((total + z_term) / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert line["loss"] == pytest.approx(((total + z_term) / count).item(), abs=1e-5)
        assert line["z_loss"] == pytest.approx((z_term / count).item(), abs=1e-5)
        assert line["lr"] == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    exported = LlamaForCausalLM.from_pretrained(one / "export").state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(exported[name], value, rtol=0, atol=1e-5)


def test_a_killed_run_goes_on_bit_by_bit(one, empty_folder, sources, tmp_path):
    path = config(tmp_path / "run", empty_folder, sources, num_workers=2)
    kill_at(path, 3, module="trainer.train pretrain")
    assert "resuming from checkpoints/step_" in pretrain(path, attempt=1)
    assert curve(path.parent) == curve(one)
    own, wanted = (load_file(run / "export/model.safetensors") for run in (path.parent, one))
    assert all(own[name].equal(value) for name, value in wanted.items())


def test_it_goes_on_from_trained_weights(model_folder, sources, corpus, tmp_path):
    changes = {"from_scratch": False, "max_steps": 2, "z_loss": None, "num_workers": 1}
    path = config(tmp_path / "run", model_folder, sources, **changes)
    content = yaml.safe_load(path.read_text())
    content["run_val_every_n_steps"] = 1
    content["dataset_val"] = {
        "_component_": "torchtune.datasets.text_completion_dataset",
        "source": "parquet",
        "data_files": str(corpus / "code.parquet"),
        "column": "content",
        "split": "train[:20]",
        "packed": True,
    }
    path.write_text(yaml.safe_dump(content))
    pretrain(path)
    first, last = metrics(path.parent)
    assert "z_loss" not in first
    assert first["loss"] == pytest.approx(torch.tensor(1024.0).log().item(), abs=0.2)
    assert last["val_loss"] < first["val_loss"] < 7.2


def test_a_check_shows_the_first_documents(empty_folder, sources, corpus, tmp_path):
    path = config(tmp_path / "run", empty_folder, sources)
    (shown,), faults = previews(load(path, PretrainConfig), 2)
    assert not faults and shown["read"] == 8 + 60 + 60
    assert "web 0: node queue" in json.dumps(shown["shown"])
    content = read_yaml(path) | {"entry": "pretrain", "checkpointer": {"checkpoint_dir": "x"}}
    blocks = files.dataset_blocks(content)
    assert [block["name"] for _, _, block in blocks] == ["web", "code", "books"]
    assert [str(p) for _, _, b in blocks for p in files.data_files(b)] == [
        str(corpus / "code.parquet"),
        str(corpus / "books.parquet"),
    ]
