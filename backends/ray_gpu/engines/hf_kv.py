"""The KV pool: one tensor of a fixed number of tokens, laid out in rows, one a running request.

A row has `columns` places; position p of a sequence lies in column p. All rows are equally long, so that the batch is a
plain view of the pool and a decode step copies nothing but the new keys and values. How long a row is follows from the
longest request that runs, and changes with it (`lay_out`).

What lies beyond a sequence's end is masked out by attention, but must be a finite number (0 times NaN is NaN): the pool
begins as zeros, and a row whose model went astray is cleared.
"""

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class KvPool:
    """Keys and values of `tokens` tokens for `layers` layers of `heads` key-value heads of `dim` numbers."""

    def __init__(self, layers: int, heads: int, dim: int, tokens: int, dtype: torch.dtype) -> None:
        self.tokens = tokens
        self.columns = tokens
        self._shape = (layers, 2, tokens * heads * dim)
        self._heads, self._dim = heads, dim
        self._dtype = dtype
        self._tensor: torch.Tensor | None = None
        self._first = 0
        self._positions: torch.Tensor | None = None
        self._width = 0
        self.cache = Cache(layers=[_PoolLayer(self, index) for index in range(layers)])
        """What the model reads and writes through: first set with `prefill` or `decode`."""

    @property
    def nbytes(self) -> int:
        """Of the whole pool, when it is allocated."""
        layers, two, numbers = self._shape
        return layers * two * numbers * self._dtype.itemsize

    @property
    def resident(self) -> int:
        return 0 if self._tensor is None else self._tensor.untyped_storage().nbytes()

    def allocate(self) -> None:
        self._tensor = torch.zeros(self._shape, dtype=self._dtype)

    def free(self) -> None:
        self._tensor = None

    def clear(self, row: int) -> None:
        """Zero a row: what is in it may not be finite."""
        self._rows()[:, :, row] = 0

    def lay_out(self, columns: int, rows: int, length: int) -> None:
        """Change the length of a row; the first `length` columns of the first `rows` rows stay what they are."""
        kept = self._rows()[:, :, :rows, :, :length].clone()
        self.columns = columns
        self._rows()[:, :, :rows, :, :length] = kept

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` columns of one row to another."""
        rows = self._rows()
        rows[:, :, target, :, :length] = rows[:, :, source, :, :length]

    def prefill(self, first: int) -> None:
        """What the model writes next are whole sequences, from row `first` on."""
        self._first, self._positions = first, None

    def decode(self, positions: torch.Tensor) -> None:
        """What the model writes next is one token for each row from 0 on, at these positions."""
        self._positions = positions
        self._width = int(positions.max()) + 1

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep new keys and values (rows, heads, new tokens, dim); return all that the new tokens may attend to."""
        pool = self._rows()[layer]
        if self._positions is None:
            rows = slice(self._first, self._first + keys.shape[0])
            pool[0, rows, :, : keys.shape[2]] = keys
            pool[1, rows, :, : keys.shape[2]] = values
            return keys, values
        rows = torch.arange(len(self._positions))
        pool[0][rows, :, self._positions] = keys[:, :, 0]
        pool[1][rows, :, self._positions] = values[:, :, 0]
        seen = pool[:, : len(rows), :, : self._width]
        return seen[0], seen[1]

    def _rows(self) -> torch.Tensor:
        """As (layers, 2, rows, heads, columns, dim); a remainder too short for a row is left out."""
        assert self._tensor is not None, "the pool is used only while it is awake"
        rows = self.tokens // self.columns
        used = rows * self.columns * self._heads * self._dim
        return self._tensor[:, :, :used].view(*self._shape[:2], rows, self._heads, self.columns, self._dim)


class _PoolLayer(CacheLayerMixin):
    """One layer of the pool, as transformers wants it. The model gets its masks ready-made; nobody asks for sizes."""

    is_sliding = False

    def __init__(self, pool: KvPool, index: int) -> None:
        super().__init__()
        self._pool, self._index = pool, index

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._pool.write(self._index, key_states, value_states)

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Nothing to do: the pool is there."""

    def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
        return self._pool.columns, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self._pool.columns

    get_max_cache_shape = get_max_length  # its name before transformers 5.20
