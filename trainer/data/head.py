"""The first records of a Parquet file as JSON lines: python -m trainer.data.head FILE COUNT"""

import json
import sys
from itertools import islice

from pyarrow import parquet


def main(name: str, count: int) -> None:
    """Print `count` records at most; what JSON has no type for is printed as text."""
    batches = parquet.ParquetFile(name).iter_batches(batch_size=count)
    records = (record for batch in batches for record in batch.to_pylist())
    for record in islice(records, count):
        print(json.dumps(record, default=str))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
