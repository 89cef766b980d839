"""Comparing a model's greedy generation with and without the patch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Verification", "compare"]


@dataclass(frozen=True)
class Verification:
    """What two greedy generations from the same prompts had in common."""

    tokens_equal: bool
    # Over the steps before the first differing token, that step included.
    max_logit_difference: float
    tokens: Tensor
    reference_tokens: Tensor

    def __str__(self) -> str:
        return (
            f"tokens {'equal' if self.tokens_equal else 'DIFFERENT'}, logits within "
            f"{self.max_logit_difference:.2e} over {self.tokens.shape[1]} tokens"
        )


def compare(
    model: nn.Module,
    patched: Callable[[nn.Module], AbstractContextManager[Any]],
    input_ids: Tensor,
    attention_mask: Tensor | None,
    max_new_tokens: int,
) -> Verification:
    """Generate from an unpatched ``model``, then inside ``patched``, and compare.

    Raises:
        ValueError: the patch does not serve the model.
    """
    arguments = (model, input_ids, attention_mask, max_new_tokens)
    reference_tokens, reference_logits = _generate(*arguments)
    with patched(model) as report:
        if not report.layers:
            raise ValueError(f"verify: model must be one that patch serves, got\n{report}")
        tokens, logits = _generate(*arguments)
    difference = 0.0
    for step in range(min(tokens.shape[1], reference_tokens.shape[1])):
        gap = (logits[step] - reference_logits[step]).abs().max()
        difference = max(difference, float(gap))
        if not torch.equal(tokens[:, step], reference_tokens[:, step]):
            break
    equal = tokens.shape == reference_tokens.shape and torch.equal(tokens, reference_tokens)
    return Verification(equal, difference, tokens, reference_tokens)


def _generate(
    model: Any, input_ids: Tensor, attention_mask: Tensor | None, max_new_tokens: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    result = model.generate(
        input_ids,
        attention_mask=attention_mask,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        cache_implementation="static",
        return_dict_in_generate=True,
        output_logits=True,
        disable_compile=True,
    )
    # Clones: the next generation may reuse the memory.
    return result.sequences[:, input_ids.shape[1] :].clone(), tuple(
        x.clone() for x in result.logits
    )
