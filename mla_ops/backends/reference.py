"""The oracle: eager PyTorch on any device and dtype, written to be read, not to be fast."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_ops.shapes import BALANCED_SPLITS_PER_BLOCK, BLOCK_TOKENS, IDLE_REQUEST, DecodeShape

__all__ = [
    "append_kv_",
    "merge_states",
    "mla_decode_out",
    "mla_metadata_out",
    "unavailable",
    "unsupported",
]


def unavailable(device: torch.device) -> list[str]:
    """Return why this backend cannot run on ``device``: it always can."""
    return []


def unsupported(shape: DecodeShape) -> list[str]:
    """Return why this backend cannot serve a call of ``shape``: it serves every checked one."""
    return []


def mla_decode_out(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    tile_scheduler_metadata: Tensor | None,
    num_splits: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    attn_sink: Tensor | None,
) -> None:
    """Write softmax(scale * q k^T) v over the keys each query sees."""
    batch, seqlen_q, _, _ = q.shape
    pages, page_size, _, _ = kv_cache.shape
    head_dim_v = out.shape[-1]
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32

    tokens = block_table.shape[1] * page_size
    page = block_table.repeat_interleave(page_size, dim=1)  # [B, M * P]
    position = torch.arange(tokens, device=q.device)
    length = cache_seqlens.clamp(0, tokens)
    present = (page >= 0) & (page < pages) & (position < length[:, None])  # [B, M * P]
    row = torch.where(present, page.long() * page_size + position % page_size, 0)
    keys = kv_cache[row // page_size, row % page_size, 0].to(compute)  # [B, M * P, D]
    keys = torch.where(present[..., None], keys, 0.0)

    last = length[:, None] - seqlen_q + torch.arange(seqlen_q, device=q.device) + 1
    limit = last if causal else length[:, None].expand(batch, seqlen_q)  # [B, S]
    seen = present[:, None, :] & (position < limit[..., None])  # [B, S, M * P]

    logits = torch.einsum("bshd,btd->bsht", q.to(compute), keys) * softmax_scale
    logits = logits.masked_fill(~seen[:, :, None, :], -torch.inf)
    log_sum = torch.logsumexp(logits, dim=-1)  # [B, S, H]
    weights = torch.exp(logits - torch.where(log_sum == -torch.inf, 0.0, log_sum)[..., None])
    result = torch.einsum("bsht,btv->bshv", weights, keys[..., :head_dim_v])
    if attn_sink is not None:
        share = torch.sigmoid(log_sum - attn_sink.to(compute))
        # An empty row stays 0 even beside a sink of -inf.
        result = result * torch.where(log_sum == -torch.inf, 0.0, share)[..., None]
    out.copy_(result)
    lse.copy_(log_sum.transpose(1, 2))


def append_kv_(kv_cache: Tensor, kv_c: Tensor, k_pe: Tensor, slot_mapping: Tensor) -> None:
    """Write each token's latent and rope into its slot; skip slots outside the pool."""
    pages, page_size, _, _ = kv_cache.shape
    valid = (slot_mapping >= 0) & (slot_mapping < pages * page_size)
    # Without a sync nothing can be left out: a skipped token repeats the write of a valid one,
    # or, when no token is valid, rewrites the first slot with what it holds.
    stand_in = valid.int().argmax()
    source = torch.where(valid, torch.arange(valid.numel(), device=valid.device), stand_in)
    slots = torch.where(valid.any(), slot_mapping[source], 0)
    tokens = torch.cat((kv_c, k_pe), dim=1)[source]
    tokens = torch.where(valid.any(), tokens, kv_cache[0, 0, 0])
    kv_cache[slots // page_size, slots % page_size, 0] = tokens


def merge_states(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
    """Weigh every shard's output by the share of its keys in the whole softmax."""
    compute = torch.float64 if outs.dtype == torch.float64 else torch.float32
    shard_lse = lses.transpose(2, 3).to(compute)  # [K, B, S, H]
    total = torch.logsumexp(shard_lse, dim=0)  # [B, S, H]
    share = torch.exp(shard_lse - torch.where(total == -torch.inf, 0.0, total))
    # Select, do not multiply: an empty shard's out may hold NaN.
    values = torch.where((shard_lse == -torch.inf)[..., None], 0.0, outs.to(compute))
    out.copy_((values * share[..., None]).sum(0))
    lse.copy_(total.transpose(1, 2))


def mla_metadata_out(
    cache_seqlens: Tensor,
    tile_scheduler_metadata: Tensor,
    num_splits: Tensor,
    *,
    overhead: int,
    topk: int | None,
    topk_length: Tensor | None,
    schedule: str,
) -> None:
    """Plan the decode of every request over T parts, without a sync.

    Lay the requests on a line, request r at ``start[r]`` and ``blocks[r] + overhead`` long. A
    part that begins at x on that line ends at the last request boundary within its payload, or
    ``overhead`` before the payload's end, whichever comes later.
    """
    parts, batch = tile_scheduler_metadata.shape[0], cache_seqlens.shape[0]
    lengths = cache_seqlens.clamp(min=0).long()
    if topk is not None:
        lengths = torch.full_like(lengths, topk) if topk_length is None else topk_length.long()
    blocks = (lengths - 1).clamp(min=0) // BLOCK_TOKENS + 1
    start = torch.nn.functional.pad(torch.cumsum(blocks + overhead, 0), (1, 0))  # [B + 1]
    total = start[-1]
    quota = (total + parts - 1) // parts
    if schedule == "balanced" and batch > 0:
        quota = balanced_quota(quota, blocks.amax())
    payload = quota + overhead

    begins = [torch.zeros_like(total)]
    for _ in range(parts):
        reach = begins[-1] + payload
        boundary = torch.where(start <= reach, start, 0).amax()
        begins.append(torch.minimum(torch.maximum(boundary, reach - overhead), total))
    begin = torch.stack(begins)  # [T + 1]
    write_schedule(begin, start, blocks, lengths, tile_scheduler_metadata, num_splits, batch=batch)


def balanced_quota(own: Tensor, longest: Tensor) -> Tensor:
    """Return the blocks of a part that minimise the modelled time of decode and combine.

    Args:
        own: blocks of a part in FlashMLA's schedule, a 0-d integer tensor.
        longest: blocks of the longest request.
    """
    cheapest = (longest // BALANCED_SPLITS_PER_BLOCK).double().sqrt().long()
    return torch.maximum(own, cheapest)


def write_schedule(
    begin: Tensor,
    start: Tensor,
    blocks: Tensor,
    lengths: Tensor,
    tile_scheduler_metadata: Tensor,
    num_splits: Tensor,
    *,
    batch: int,
) -> None:
    """Write the metadata of parts that begin at ``begin`` [T + 1] on the line of requests."""
    parts = begin.shape[0] - 1
    num_splits.zero_()
    tile_scheduler_metadata.zero_()
    tile_scheduler_metadata[:, 0] = IDLE_REQUEST
    if batch == 0:
        return
    request = torch.searchsorted(start, begin, right=True) - 1  # [T + 1]
    block = begin - start[request]
    first_part = torch.searchsorted(begin, start[:-1], right=True) - 1  # [B]
    last_part = torch.searchsorted(begin[1:], start[1:])  # [B]
    num_splits[1:] = torch.cumsum(last_part - first_part + 1, 0)

    busy = request[:-1] < batch
    begin_req = request[:-1].clamp(max=batch - 1)
    whole = block[1:] == 0
    end_req = (request[1:] - whole.long()).clamp(0, batch - 1)
    end_block = torch.where(
        whole, torch.where(lengths[end_req] == 0, 0, blocks[end_req]), block[1:]
    )
    part = torch.arange(parts, device=begin.device)
    split = torch.where(block[:-1] == 0, 0, part - first_part[begin_req])
    first = block[:-1] != 0
    last = (end_block != blocks[end_req]) & (lengths[end_req] != 0)
    either = first | last
    single = begin_req == end_req
    first, last = torch.where(single, either, first), torch.where(single, either, last)
    fields = (begin_req, end_req, block[:-1], end_block, split, first, last)
    rows = torch.stack([field.int() for field in fields], dim=1)  # [T, 7]
    tile_scheduler_metadata[:, :7] = torch.where(
        busy[:, None], rows, tile_scheduler_metadata[:, :7]
    )
