"""Near duplicates by others: python -m benchmarks.peers.near datasketch|datatrove DOCUMENTS OUT

DOCUMENTS is a folder of Parquet files with a column text. benchmarks/data.py runs it with a Python
that has the two packages; it needs nothing else of the kit.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    import pyarrow.parquet as pq

    name, documents, out = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    texts = pq.read_table(documents, columns=["text"])["text"].to_pylist()
    {"datasketch": _datasketch, "datatrove": _datatrove}[name](texts, out)


def _datasketch(texts: list[str], out: Path) -> None:
    from datasketch import MinHash, MinHashLSH

    # The bands of plugins.data.steps.near.
    index = MinHashLSH(num_perm=96, params=(16, 6))
    for number, text in enumerate(texts):
        words = text.split()
        sketch = MinHash(num_perm=96)
        grams = {" ".join(words[place : place + 3]).encode() for place in range(len(words) - 2)}
        sketch.update_batch(list(grams))
        index.query(sketch)
        index.insert(str(number), sketch)


def _datatrove(texts: list[str], out: Path) -> None:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import (
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
        MinhashDedupSignature,
    )
    from datatrove.pipeline.dedup.minhash import MinhashConfig
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import JsonlWriter

    folder = out / "datatrove"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "in").mkdir(parents=True)
    half = (len(texts) + 1) // 2
    for part in range(2):
        lines = [
            json.dumps({"text": text, "id": str(number)})
            for number, text in enumerate(texts[part * half : (part + 1) * half], part * half)
        ]
        (folder / "in" / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
    config = MinhashConfig(n_grams=3)
    reader = JsonlReader(str(folder / "in"))

    def run(pipeline: list[Any], tasks: int) -> None:
        LocalPipelineExecutor(
            pipeline=pipeline,
            tasks=tasks,
            workers=min(tasks, 2),
            skip_completed=False,
            logging_dir=str(folder / f"logs-{len(list(folder.iterdir()))}"),
        ).run()

    signatures, buckets, removed = (str(folder / name) for name in ("sig", "buckets", "remove"))
    run([reader, MinhashDedupSignature(signatures, config=config)], 2)
    run([MinhashDedupBuckets(signatures, buckets, config=config)], config.num_buckets)
    run([MinhashDedupCluster(buckets, removed, config=config)], 1)
    run([reader, MinhashDedupFilter(removed), JsonlWriter(str(folder / "out"))], 2)


if __name__ == "__main__":
    main()
