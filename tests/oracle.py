"""Independent oracles: plain loops in float64 and Python integers; no code of mla_ops."""

import math

import torch

BLOCK = 64
IDLE = 2147483647


def decode(
    q,
    kv_cache,
    block_table,
    cache_seqlens,
    softmax_scale,
    head_dim_v,
    *,
    causal=True,
    attn_sink=None,
):
    """Return out [B, S, H, V] and lse [B, H, S] in float64, one query row at a time."""
    batch, seqlen_q, heads, _ = q.shape
    pages, page_size = kv_cache.shape[:2]
    out = torch.zeros(batch, seqlen_q, heads, head_dim_v, dtype=torch.float64)
    lse = torch.full((batch, heads, seqlen_q), -math.inf, dtype=torch.float64)
    for b in range(batch):
        table = block_table[b].tolist()
        length = min(max(int(cache_seqlens[b]), 0), len(table) * page_size)
        for s in range(seqlen_q):
            limit = length - seqlen_q + s + 1 if causal else length
            keys = [
                kv_cache[table[t // page_size], t % page_size, 0].double()
                for t in range(limit)
                if 0 <= table[t // page_size] < pages
            ]
            if not keys:
                continue
            rows = torch.stack(keys)  # [keys seen, D]
            logits = q[b, s].double() @ rows.T * softmax_scale  # [H, keys seen]
            largest = logits.amax(1, keepdim=True)
            weights = (logits - largest).exp()
            total = weights.sum(1, keepdim=True)
            lse[b, :, s] = (largest + total.log())[:, 0]
            denominator = total
            if attn_sink is not None:
                denominator = total + (attn_sink.double()[:, None] - largest).exp()
            out[b, s] = weights @ rows[:, :head_dim_v] / denominator
    return out, lse


def append(kv_cache, kv_c, k_pe, slot_mapping):
    """Return what the pool must hold after the tokens were written, one token at a time."""
    expected = kv_cache.clone()
    pages, page_size = kv_cache.shape[:2]
    for token, slot in enumerate(slot_mapping.tolist()):
        if 0 <= slot < pages * page_size:
            row = torch.cat((kv_c[token], k_pe[token]))
            expected[slot // page_size, slot % page_size, 0] = row
    return expected


def request_blocks(lengths):
    return [max(length - 1, 0) // BLOCK + 1 for length in lengths]


def schedule(lengths, parts, *, overhead=5, balanced=False):
    """Walk FlashMLA's algorithm serially; return (rows, num_splits) as lists of integers.

    ``balanced`` only raises the payload to floor(sqrt(longest request / 8)) blocks and overhead.
    """
    blocks = request_blocks(lengths)
    quota = -(-sum(n + overhead for n in blocks) // parts)
    if balanced and blocks:
        quota = max(quota, math.isqrt(max(blocks) // 8))
    payload = quota + overhead
    req = blk = split = cum = 0
    rows, num_splits = [], [0] * (len(lengths) + 1)
    for _ in range(parts):
        if req >= len(lengths):
            rows.append([IDLE] + [0] * 7)
            continue
        begin_req, begin_block, begin_split, first = req, blk, split, blk != 0
        rem = payload
        while req < len(lengths):
            left = blocks[req] - blk
            if rem >= left + overhead:
                cum += split + 1
                num_splits[req + 1] = cum
                rem -= left + overhead
                req, blk, split = req + 1, 0, 0
                continue
            if rem > overhead:
                blk += rem - overhead
                split += 1
            break
        end_req = req if blk > 0 else req - 1
        end_block = blk if blk > 0 else (0 if lengths[end_req] == 0 else blocks[end_req])
        last = end_block != blocks[end_req] and lengths[end_req] != 0
        if begin_req == end_req:
            first = last = first or last
        rows.append(
            [begin_req, end_req, begin_block, end_block, begin_split, int(first), int(last), 0]
        )
    assert (req, blk, split) == (len(lengths), 0, 0)
    return rows, num_splits
