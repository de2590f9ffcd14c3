"""Packing: whole samples side by side in rows of one length."""

import numpy as np

# Samples among which the best fit is looked for; rows of one window are of mixed origin.
WINDOW = 8192


def pack(lengths: np.ndarray, row_length: int, seed: int | None) -> list[list[int]]:
    """Put every sample into exactly one row: best fit decreasing, window by window.

    The result depends on the arguments alone, so that every rank, layout and start has the same
    rows. Best fit decreasing needs at most 11/9 of the fewest rows (Johnson 1973).

    Args:
        lengths: tokens of each sample, [samples], each from 1 to `row_length`.
        row_length: tokens in a row.
        seed: windows are drawn from a permutation by it; None takes the samples in order.

    Returns:
        The samples' indices in each row, ascending.
    """
    order = np.arange(len(lengths))
    if seed is not None:
        order = np.random.default_rng(seed).permutation(len(lengths))
    rows: list[list[int]] = []
    for begin in range(0, len(order), WINDOW):
        window = np.sort(order[begin : begin + WINDOW])
        rows += _best_fit(window, lengths[window], row_length)
    return rows


def _best_fit(indices: np.ndarray, lengths: np.ndarray, row_length: int) -> list[list[int]]:
    # open_rows[n]: rows with room for n more tokens; bit n of `rooms` says that there is one.
    open_rows: dict[int, list[list[int]]] = {}
    rooms = 0
    rows: list[list[int]] = []
    for position in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[position])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = open_rows[room].pop()
            if not open_rows[room]:
                rooms &= ~(1 << room)
        else:
            room, row = row_length, []
            rows.append(row)
        row.append(int(indices[position]))
        left = room - length
        if left:
            open_rows.setdefault(left, []).append(row)
            rooms |= 1 << left
    return sorted(sorted(row) for row in rows)
