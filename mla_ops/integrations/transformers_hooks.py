"""The functions transformers calls in a patched model: attention, mask and expansion.

Every MLA attention of transformers runs ``cache.update``, ``expand_kv``, then the attention
function. With an ``MLAStaticCache`` the first two hand the cache layer and the new latents
through, so that the third sees latents. With any other cache, or none, they are tensors and the
model's own expansion runs: transformers' numbers, at transformers' speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask

from mla_ops.errors import CacheCapacityError
from mla_ops.integrations.transformers_attention import (
    expanded_attention,
    paged_attention,
    sparse_attention,
)
from mla_ops.integrations.transformers_pool import (
    PAGED,
    PAGED_INDEXED,
    MLAIndexedStaticLayer,
    MLAStaticLayer,
)
from mla_ops.shapes import MAX_SEQLEN_Q

__all__ = ["NAME", "attention", "keep_latents", "mask", "register"]

# transformers turns fullgraph off for names that contain "flash".
NAME = "mla_ops"
# What models pass along that does not change attention over a cache.
_HARMLESS = frozenset(
    (
        *("position_ids", "cache_position", "use_cache", "output_hidden_states", "return_dict"),
        *("output_router_logits", "logits_to_keep"),
    )
)


def keep_latents(kv_nope: Any, k_rot: Any) -> tuple[Any, Any]:
    """Stand in for ``expand_kv``: hand the latents on as they are."""
    return kv_nope, k_rot


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: Any = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """Return the tokens each row will have, int32 [B, 1, 1, 1]; elsewhere, transformers' mask.

    At the first prefill of more than 8 tokens: None when no row is padded (plain causal), else
    the same lengths as int64.

    Raises:
        ValueError: a mask that is not zeros followed by ones in every row, or a custom one.
        CacheCapacityError: more tokens than the cache holds.
    """
    if kv_offset != PAGED:
        if kv_offset == PAGED_INDEXED:
            kv_offset = 0
            # The indexer reads the mask: transformers must not leave it out.
            kwargs["allow_is_causal_skip"] = False
        return _transformers_mask(
            *(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function),
            *(attention_mask, device),
            **kwargs,
        )
    if mask_function is not causal_mask_function:
        raise ValueError(
            "mla_ops: attention mask must be causal with padding, got a custom mask function "
            "(packed, prefix and windowed masks are not served: unpatch the model)"
        )
    seen = q_offset + q_length
    lengths = _lengths(batch_size, seen, kv_length, attention_mask, device)
    if q_length == 1 or torch.compiler.is_compiling():
        return lengths
    _check_padding(attention_mask, int(seen))
    if q_length <= MAX_SEQLEN_Q or int(seen) > q_length:
        return lengths
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return lengths.long()


def _lengths(
    batch_size: int, seen: Any, kv_length: int, attention_mask: Tensor | None, device: Any
) -> Tensor:
    """Return the tokens of every row without its padding, int32 [B, 1, 1, 1]."""
    if attention_mask is not None:
        if attention_mask.shape[-1] > kv_length:
            raise CacheCapacityError(
                f"MLAStaticCache: attention_mask must be of at most max_cache_len = {kv_length} "
                f"tokens, got {attention_mask.shape[-1]} (build a longer cache)"
            )
        lengths = attention_mask.sum(-1, dtype=torch.int32)
    else:
        if not torch.compiler.is_compiling() and isinstance(seen, Tensor):
            # The check of index_copy_ in transformers' own cache: on the device, without a sync.
            torch._assert_async(seen <= kv_length, "MLAStaticCache: max_cache_len is exceeded")
        lengths = torch.as_tensor(seen, device=device).to(torch.int32).expand(batch_size)
    return lengths.contiguous().view(batch_size, 1, 1, 1)


def _transformers_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any,
    kv_offset: int,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None,
    device: Any,
    **kwargs: Any,
) -> Tensor | None:
    result: Tensor | None = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        device=device,
        **kwargs,
    )
    return result


def _check_padding(attention_mask: Tensor | None, seen: int) -> None:
    """Refuse what compaction cannot represent; host side, on steps of several tokens only."""
    if attention_mask is None:
        return
    if attention_mask.shape[-1] < seen:
        raise ValueError(
            f"mla_ops: attention_mask must cover all {seen} tokens seen so far, got "
            f"{attention_mask.shape[-1]} (concatenate the mask of the cached tokens)"
        )
    rows = attention_mask[:, :seen].bool()
    if bool((rows[:, :-1] & ~rows[:, 1:]).any()) or bool(attention_mask[:, seen:].any()):
        raise ValueError(
            "mla_ops: attention_mask must be zeros followed by ones in every row, got padding "
            "after a token (pad on the left)"
        )


def attention(
    module: nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    indices: Tensor | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend: absorbed over the paged latents for up to 8 new tokens, expanded for more.

    Args:
        module: the attention module that calls.
        query: [B, H, S, nope + rope].
        key: the ``MLAStaticLayer``, or latents [B, 1, T, latent] of another cache.
        value: the new latents and ropes, or ropes [B, 1, T, rope] of another cache.
        attention_mask: what ``mask`` returned.
        dropout: must be 0.
        scaling: factor of the logits, the module's.
        indices: [B, S, topk] positions that sparse attention selected.
        s_aux: [H] logits of the attention sinks.
        kwargs: refused unless they are known to be harmless.

    Returns:
        ``([B, S, H, v], None)``.

    Raises:
        TypeError, ValueError: something that would change the result is not served.
    """
    _refuse(module, dropout, scaling, kwargs)
    assert scaling is not None
    attend: Callable[..., Tensor]
    if not isinstance(key, MLAStaticLayer):
        attend = expanded_attention
    elif isinstance(key, MLAIndexedStaticLayer):
        attend = sparse_attention
    else:
        attend = paged_attention
    out = attend(module, query, key, value, attention_mask, scaling, indices, s_aux)
    return out, None


def _refuse(
    module: nn.Module, dropout: float, scaling: float | None, kwargs: dict[str, Any]
) -> None:
    if module.training or dropout:
        raise ValueError(
            "mla_ops: model must be in evaluation mode, got training mode (call model.eval(): "
            "mla_ops is inference only)"
        )
    if scaling is None:
        raise TypeError("mla_ops: scaling must be a float, got None (pass the module's scaling)")
    for name, given in kwargs.items():
        if given is None or name in _HARMLESS:
            continue
        if name == "output_attentions":
            if given:
                raise ValueError(
                    "mla_ops: output_attentions must be False, got True (absorbed decode has no "
                    "attention weights to return: unpatch the model)"
                )
            continue
        raise TypeError(
            f"mla_ops: arguments of the attention function must be known ones, got {name} of type "
            f"{type(given).__name__} (it could change the result: unpatch the model)"
        )


def register() -> None:
    """Make the attention and the mask function known to transformers under ``NAME``."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
