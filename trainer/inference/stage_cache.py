"""The keys and values of the layers that a rank of a spread model has.

transformers asks the first layer of a kind how long the cached text is, for masks and positions.
That layer may be another rank's: here any layer of the kind that this rank has answers.
"""

from transformers import DynamicCache


class StageCache(DynamicCache):
    """transformers' cache, empty for the layers of other ranks."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens in the cache."""
        own = self._own(range(len(self.layers)))
        return super().get_seq_length(layer_idx if own is None else own)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of the keys that a query meets in layers of this one's kind."""
        kinds = self.is_sliding
        same = [index for index, kind in enumerate(kinds) if kind == kinds[layer_idx]]
        own = self._own(same)
        return super().get_mask_sizes(query_length, layer_idx if own is None else own)

    def _own(self, indices: "range | list[int]") -> int | None:
        return next((index for index in indices if self.layers[index].get_seq_length()), None)
