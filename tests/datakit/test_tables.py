"""Sources of Delta, of Iceberg and in the hub's own form: real tables, read back."""

import sys

import pyarrow as pa
import pytest

from datakit.errors import DataError
from tests.datakit.kit import qa, rows, run

ROWS = [qa("q1", "a1", n=1), qa("q2", "a2", n=2), qa("q3", None, n=3)]
KEEP = {"format": "qa", "keep": {"n": "whole"}}


def check(made, duck, origin: str) -> None:
    """Two rows are read and the third is a bad one, with its place."""
    # In the order of the table's files, which is its own affair.
    found = sorted((row["prompt"], row["answer"], row["n"]) for row in rows(made, duck))
    assert found == [("q1", "a1", 1), ("q2", "a2", 2)]
    assert made.bad_count == 1 and "'answer' is null" in made.bad[0]["reason"]
    assert origin in made.inputs[0].origin


@pytest.mark.long
def test_a_delta_table(tmp_path, duck):
    deltalake = pytest.importorskip("deltalake")
    for part in (ROWS[:1], ROWS[1:]):
        table = pa.Table.from_pylist(part)
        deltalake.write_deltalake(str(tmp_path / "table"), table, mode="append")
    source = {"path": "table", "type": "delta", **KEEP}
    made = run(tmp_path, [], duck, source=source, max_bad_share=0.5)
    check(made, duck, "table, version 1")
    with pytest.raises(DataError, match="nothing is no Delta table"):
        run(tmp_path, [], duck, work="other", source={**source, "path": "nothing"})


@pytest.mark.long
def test_an_iceberg_table(tmp_path, duck):
    pytest.importorskip("pyiceberg")
    pytest.importorskip("sqlalchemy")
    from pyiceberg.catalog.sql import SqlCatalog

    catalog = SqlCatalog("c", uri="sqlite://", warehouse=f"file://{tmp_path}")
    catalog.create_namespace("db")
    whole = pa.Table.from_pylist(ROWS)
    table = catalog.create_table("db.tickets", schema=whole.schema)
    table.append(whole)
    source = {"path": table.metadata_location, "type": "iceberg", **KEEP}
    made = run(tmp_path, [], duck, source=source, max_bad_share=0.5)
    check(made, duck, "snapshot")
    # The table's folder is enough: its newest metadata counts.
    folder = table.location().removeprefix("file://")
    again = run(
        tmp_path, [], duck, work="again", source={**source, "path": folder}, max_bad_share=0.5
    )
    check(again, duck, "snapshot")
    with pytest.raises(DataError, match="nothing is no Iceberg table"):
        run(tmp_path, [], duck, work="other", source={**source, "path": "nothing"})


@pytest.mark.long
def test_a_dataset_of_the_hub(tmp_path, duck, monkeypatch):
    """A dataset's folder, which the hub's own library loads as it loads one of the hub."""
    from datasets import Dataset

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "helpdesk"
    (folder / "data").mkdir(parents=True)
    Dataset.from_list(ROWS).to_parquet(folder / "data" / "train-00000-of-00001.parquet")
    Dataset.from_list(ROWS[:1]).to_parquet(folder / "data" / "test-00000-of-00001.parquet")
    source = {"repository": str(folder), "type": "hub", **KEEP}
    source["name"] = "desk"
    made = run(tmp_path, [], duck, sources=[source], max_bad_share=0.5)
    check(made, duck, "helpdesk@main train")
    test = run(tmp_path, [], duck, work="test", sources=[{**source, "split": "test"}])
    assert test.rows.count == 1
    with pytest.raises(DataError, match=r"split dev\) cannot be loaded"):
        run(tmp_path, [], duck, work="other", sources=[{**source, "split": "dev"}])


@pytest.mark.parametrize(("kind", "package"), [("delta", "deltalake"), ("iceberg", "pyiceberg")])
def test_a_missing_package_is_named(tmp_path, duck, monkeypatch, kind, package):
    for name in (package, f"{package}.table"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DataError, match=f"{package} is missing: bash setup.sh --with tables"):
        run(tmp_path, [], duck, source={"path": "table", "type": kind, "format": "qa"})
