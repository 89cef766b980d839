"""MLA decode and its scheduler metadata as operators that torch.compile captures whole."""

from __future__ import annotations

from mla_ops import inductor
from mla_ops.cache import MLAMetadataBuffers, PagedKVCache
from mla_ops.diagnostics import Report, explain
from mla_ops.errors import BackendUnavailableError, CacheCapacityError
from mla_ops.formats import KVFormat
from mla_ops.ops._metadata_debug import check_metadata
from mla_ops.ops._selection import BackendReport, backend_report
from mla_ops.ops._warmup import warmup
from mla_ops.ops.append import append_kv_
from mla_ops.ops.decode import MLAOutput, mla_decode
from mla_ops.ops.merge import merge_states
from mla_ops.ops.metadata import MLAMetadata, mla_metadata

__all__ = [
    "BackendReport",
    "BackendUnavailableError",
    "CacheCapacityError",
    "KVFormat",
    "MLAMetadata",
    "MLAMetadataBuffers",
    "MLAOutput",
    "PagedKVCache",
    "Report",
    "append_kv_",
    "backend_report",
    "check_metadata",
    "explain",
    "inductor",
    "merge_states",
    "mla_decode",
    "mla_metadata",
    "warmup",
]
