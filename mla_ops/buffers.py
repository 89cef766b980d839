"""FixedBuffers: modules whose tensors stay where they are, for CUDA graphs to read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from mla_ops._torch import mark_static_address

__all__ = ["FixedBuffers"]


class FixedBuffers(nn.Module):
    """A module whose buffers keep their dtype for life and their address from first use on."""

    def _register(self, name: str, tensor: Tensor) -> None:
        self.register_buffer(name, tensor, persistent=False)
        mark_static_address(tensor)

    def _used(self) -> bool:
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move buffers like any module, but never change a dtype nor an address in use."""
        for name, buffer in list(self._buffers.items()):
            assert buffer is not None
            # Probe with an empty tensor: a converted copy of a pool could exhaust the memory.
            moved = fn(buffer.new_empty(0))
            if moved.device != buffer.device and self._used():
                raise RuntimeError(
                    f"{type(self).__name__}: device must be chosen before first use, got a move "
                    f"from {buffer.device} to {moved.device} (construct it with device=...)"
                )
            if moved.device != buffer.device:
                self._register(name, buffer.to(moved.device))
        return self
