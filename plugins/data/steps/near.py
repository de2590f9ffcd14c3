"""Near duplicates: MinHash with bands finds candidates, exact Jaccard similarity decides.

Broder 1997, "On the resemblance and containment of documents"; bands as in Leskovec, Rajaraman and
Ullman, "Mining of Massive Datasets", chapter 3. A pair of similarity s becomes a candidate with
probability 1 - (1 - s^rows_per_band)^bands.
"""

from typing import Any

from plugins.data.rows import Rows, Work
from plugins.data.steps.components import components
from plugins.data.steps.exact import order

# The default finds a pair of similarity 0.8 with probability 0.99.
BANDS, ROWS_PER_BAND, NGRAM, JACCARD = 16, 6, 5, 0.8
# All pairs of a bucket up to this size; of a larger one each row with the first and the one before.
_ALL_PAIRS = 24
_SEED = 0x5DEECE66D


def probability(similarity: float, bands: int = BANDS, rows: int = ROWS_PER_BAND) -> float:
    """Return the probability that a pair of a similarity becomes a candidate."""
    return float(1 - (1 - similarity**rows) ** bands)


def near_duplicates(rows: Rows, work: Work) -> Rows:
    """Keep one row of each group of similar rows, or (action: mark) add a column with the group.

    jaccard: minimum similarity of the sets of word n-grams. keep: as in exact_duplicates. A group
    is a connected component of the similar pairs.
    """
    options = work.options
    name, ngram = options.get("column", "text"), options.get("ngram", NGRAM)
    bands, per_band = options.get("bands", BANDS), options.get("rows_per_band", ROWS_PER_BAND)
    jaccard = float(options.get("jaccard", JACCARD))
    work.notes["candidate_probability"] = {
        f"{s:.2f}": round(probability(s, bands, per_band), 4) for s in (jaccard, 0.9, 0.5)
    }
    rows = work.files(rows)
    how = {"column": name, "ngram": ngram, "bands": bands, "rows_per_band": per_band}
    made = work.map(rows, "bands", "plugins.data.steps.near:band_keys", how)
    pairs = work.remember("candidates", _candidates(work, made.table))
    work.notes["candidates"] = work.rows_of("candidates")
    similar = _similar(rows, work, pairs, {"column": name, "ngram": ngram, "jaccard": jaccard})
    work.notes["similar_pairs"] = work.rows_of("similar")
    groups = work.remember("groups", components(work, similar))
    if options.get("action") == "mark":
        work.notes["rows_in_groups"] = work.rows_of("groups")
        tags = groups.select(_id="node", near_group="label")
        return rows.kept(rows.table.left_join(tags, "_id").drop("_id_right"), rows.count)
    import ibis

    members = rows.table.inner_join(groups.select(_id="node", _group="label"), "_id")
    window = ibis.window(
        group_by=members["_group"], order_by=[*order(members, work), members["_id"].asc()]
    )
    ranked = members.select("_id", kept_id=members["_id"].first().over(window))
    return work.without(rows, ranked.filter(ranked["_id"] != ranked["kept_id"]))


def _candidates(work: Work, keys: Any) -> Any:
    """Pairs a < b of rows that share a band's key."""
    import ibis

    count = keys.group_by("band", "key").agg(n=keys.count(), first=keys["_id"].min())
    shared = work.remember("buckets", count.filter(count.n > 1))
    inside = work.remember("shared", keys.inner_join(shared, ["band", "key"]))
    small = inside.filter(inside.n <= _ALL_PAIRS)
    one = small.select("band", "key", a="_id")
    other = small.select("band", "key", b="_id")
    pairs = one.inner_join(other, ["band", "key"])
    pairs = pairs.filter(pairs.a < pairs.b).select("a", "b")
    large = inside.filter(inside.n > _ALL_PAIRS)
    window = ibis.window(group_by=[large.band, large.key], order_by=large["_id"])
    chain = large.select(a=large["_id"].lag().over(window), b=large["_id"])
    chain = chain.filter(chain.a.notnull())
    star = large.filter(large["_id"] != large["first"]).select(a="first", b="_id")
    return pairs.union(chain, star, distinct=True)


def _similar(rows: Rows, work: Work, pairs: Any, how: dict[str, Any]) -> Any:
    """Return the pairs whose texts are similar enough, each compared exactly."""
    from plugins.data.expressions import column

    text = rows.table.select("_id", text=column(rows.table, how["column"], work.where))
    left = pairs.inner_join(text.select(a="_id", text_a="text"), "a")
    both = left.inner_join(text.select(b="_id", text_b="text"), "b")
    both = both.select("a", "b", "text_a", "text_b")
    given = Rows(both, work.rows_of("candidates"))
    texts = work.files(given, "pair_texts")
    options = {"ngram": how["ngram"], "jaccard": how["jaccard"]}
    return work.map(texts, "similar", "plugins.data.steps.near:similar_pairs", options).table


# Arrow functions -----------------------------------------------------------------------------


def band_keys(table: Any, column: str, ngram: int, bands: int, rows_per_band: int) -> Any:
    """Return (_id, band, key): one row per text and band; equal keys make a candidate.

    The hash functions are h -> (a * h + b) of 64 bits, of which the upper 32 are compared.
    """
    import numpy as np
    import pyarrow as pa

    from plugins.data.text import shingles, texts

    hashes, starts = shingles(texts(table, column), ngram)
    count = len(table)
    generator = np.random.Generator(np.random.PCG64(_SEED))
    factors = generator.integers(0, 2**64, (bands, rows_per_band, 2), np.uint64) | np.uint64(1)
    ids = table["_id"].to_numpy()
    keys = np.empty((bands, count), np.uint64)
    for band in range(bands):
        key = np.full(count, band, np.uint64)
        for factor, shift in factors[band]:
            # In place, because this loop is limited by memory bandwidth.
            mixed = hashes * factor
            mixed += shift
            mixed >>= np.uint64(32)
            low = np.minimum.reduceat(mixed.astype(np.uint32), starts[:-1]) if count else mixed
            key = (key ^ low.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
            key ^= key >> np.uint64(29)
        keys[band] = key
    return pa.table(
        {
            "_id": pa.array(np.tile(ids, bands), pa.int64()),
            "band": pa.array(np.repeat(np.arange(bands), count), pa.int32()),
            "key": pa.array(keys.reshape(-1).view(np.int64), pa.int64()),
        }
    )


def similar_pairs(table: Any, ngram: int, jaccard: float) -> Any:
    """Return the pairs (a, b) whose texts have a Jaccard similarity of at least `jaccard`."""
    import numpy as np
    import pyarrow as pa

    from plugins.data.text import shingles, texts

    sides = [shingles(texts(table, name), ngram) for name in ("text_a", "text_b")]
    sets = [_distinct(hashes, starts) for hashes, starts in sides]
    # All shingles of both sides by pair: those that occur twice are shared.
    rows = np.concatenate([sets[0][0], sets[1][0]])
    values = np.concatenate([sets[0][1], sets[1][1]])
    places = np.lexsort((values, rows))
    rows, values = rows[places], values[places]
    twice = (rows[1:] == rows[:-1]) & (values[1:] == values[:-1])
    count = len(table)
    shared = np.bincount(rows[1:][twice], minlength=count)
    whole = np.bincount(rows, minlength=count) - shared
    # Integers, so that a similarity that equals the limit counts on every machine.
    kept = shared >= np.ceil(jaccard * whole - 1e-9)
    mask = pa.array(kept & (whole > 0))
    return table.select(["a", "b"]).filter(mask)


def _distinct(hashes: Any, starts: Any) -> tuple[Any, Any]:
    """Return (row, hash) of the distinct hashes of each row."""
    import numpy as np

    rows = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    places = np.lexsort((hashes, rows))
    rows, hashes = rows[places], hashes[places]
    first = np.ones(len(rows), bool)
    first[1:] = (rows[1:] != rows[:-1]) | (hashes[1:] != hashes[:-1])
    return rows[first], hashes[first]
