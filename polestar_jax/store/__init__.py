"""Where the rows of a decoding are kept: on the device or in pinned host memory, whole or in four
bits a value (arXiv 2607.14107, system optimisation). Pure functions on frozen pytrees."""

from polestar_jax.store.place import has_host_memory, resolve
from polestar_jax.store.rows import RowStore, empty_rows, open_rows, read_rows, update_rows

__all__ = [
    "RowStore",
    "empty_rows",
    "has_host_memory",
    "open_rows",
    "read_rows",
    "resolve",
    "update_rows",
]
