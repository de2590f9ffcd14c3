"""Words and shingles of texts, vectorized with Arrow and numpy."""

from typing import Any

# Scripts without spaces between words: each of their characters is a word.
_UNSPACED = r"([\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}])"
_GAPS = r"[^\pL\pN\pM]+"
# Odd multipliers, so that a sum of products depends on the order of words.
_PRIME = 0x9E3779B97F4A7C15


def texts(table: Any, name: str = "text") -> Any:
    """Return a text column of Arrow rows without nulls; `text` is prompt, new line, answer."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if name == "text" and "text" not in table.column_names:
        prompt, answer = table["prompt"].cast(pa.string()), table["answer"].cast(pa.string())
        both = pc.binary_join_element_wise(prompt, answer, "\n")
        values = pc.if_else(pc.is_null(prompt), answer, both)
    else:
        values = table[name].cast(pa.string())
    values = pc.fill_null(values, "")
    return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values


def split(values: Any) -> Any:
    """Return the lower-case words of each text, an Arrow list per row."""
    import pyarrow.compute as pc

    spaced = pc.replace_substring_regex(pc.utf8_lower(values), _UNSPACED, r" \1 ")
    spaced = pc.utf8_trim(pc.replace_substring_regex(spaced, _GAPS, " "), " ")
    return pc.split_pattern(spaced, " ")


def _hashes_of(values: Any) -> Any:
    """Return a hash of each text, as uint64."""
    import numpy as np
    import xxhash

    each = values.dictionary_encode()
    known = [xxhash.xxh3_64_intdigest(text.encode()) for text in each.dictionary.to_pylist()]
    return np.array(known, np.uint64)[each.indices.to_numpy(zero_copy_only=False)]


def shingles(values: Any, ngram: int) -> tuple[Any, Any]:
    """Return the hashes of each text's word n-grams, and where each text's begin.

    A text of fewer words than ngram has one shingle, all its words.

    Returns:
        uint64 [shingles], and int64 [rows + 1] offsets into them.
    """
    import numpy as np
    import xxhash

    lists = split(values)
    words = _hashes_of(lists.flatten())
    offsets = lists.offsets.to_numpy().astype(np.int64)
    offsets = offsets - offsets[0]
    lengths = np.diff(offsets)
    rolled = np.zeros(len(words), np.uint64)
    # One pass per place in the n-gram; a multiplication of uint64 wraps around.
    for place in range(ngram):
        factor = np.uint64(pow(_PRIME, place + 1, 2**64) | 1)
        end = len(words) - place
        if end > 0:
            rolled[:end] += words[place:] * factor
    short = lengths < ngram
    counts = np.where(short, 1, lengths - ngram + 1)
    starts = np.concatenate([[0], np.cumsum(counts)])
    row = np.repeat(np.arange(len(lengths)), counts)
    within = np.arange(starts[-1]) - starts[row]
    places = np.minimum(offsets[row] + within, max(len(rolled) - 1, 0))
    made = rolled[places] if len(rolled) else np.zeros(len(places), np.uint64)
    for index in np.flatnonzero(short):
        own = words[offsets[index] : offsets[index + 1]].tobytes()
        made[starts[index]] = xxhash.xxh3_64_intdigest(own)
    return _mixed(made), starts


def with_column(table: Any, name: str, values: Any) -> Any:
    """Return Arrow rows with a new column, or with other values in one that they have."""
    if name in table.column_names:
        return table.set_column(table.column_names.index(name), name, values)
    return table.append_column(name, values)


def _mixed(values: Any) -> Any:
    """Spread the bits of hashes (the finaliser of splitmix64, public domain)."""
    import numpy as np

    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
