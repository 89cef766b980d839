"""PagedKVCache under random programs, against a plain Python model that also reads the pools."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mla_ops import CacheCapacityError, PagedKVCache

ROWS, PAGES = 4, 7
LATENT, ROPE = 3, 1


def slots_of(slots, row, count):
    return slots[row * count : (row + 1) * count].tolist()


def addresses(module):
    return {name: buffer.data_ptr() for name, buffer in module.named_buffers()}


class CacheMachine(RuleBasedStateMachine):
    """Random programs of allocate, advance, append, free and reset."""

    @initialize(page_size=st.integers(1, 5), max_seq_len=st.integers(1, 14))
    def start(self, page_size, max_seq_len):
        self.page_size, self.max_seq_len = page_size, max_seq_len
        self.cache = PagedKVCache(
            *(2, ROWS, max_seq_len),
            latent_dim=LATENT,
            rope_dim=ROPE,
            page_size=page_size,
            num_pages=PAGES,
            dtype=torch.float32,
        )
        self.addresses = addresses(self.cache)
        self.pages = [0] * ROWS  # pages each row owns
        self.tokens = [[] for _ in range(ROWS)]  # what each row holds, in order
        self.next_token = 1.0

    def capacity(self, row):
        return min(self.pages[row] * self.page_size, self.max_seq_len)

    @rule(row=st.integers(0, ROWS - 1), count=st.integers(0, 16))
    def allocate(self, row, count):
        wanted = -(-count // self.page_size) - self.pages[row]
        state = [buffer.clone() for buffer in self.cache.buffers()]
        if count > self.max_seq_len:
            with pytest.raises(CacheCapacityError, match=r"\(raise max_seq_len\)"):
                self.cache.allocate(row, count)
        elif wanted > PAGES - sum(self.pages):
            with pytest.raises(CacheCapacityError, match=r"\(raise num_pages or free a row\)"):
                self.cache.allocate(row, count)
        else:
            self.cache.allocate(row, count)
            self.pages[row] += max(wanted, 0)
            return
        for buffer, then in zip(self.cache.buffers(), state, strict=True):
            assert torch.equal(buffer, then), "written before the refusal"

    @rule(batch=st.integers(0, ROWS), count=st.integers(0, 6))
    def advance_and_append(self, batch, count):
        slots = self.cache.advance_(batch, count)
        assert slots.dtype == torch.int64
        assert slots.shape == (batch * count,)
        values = torch.arange(batch * count) + self.next_token
        self.next_token += batch * count
        for layer in range(2):
            kv_c = (values + 1000 * layer)[:, None].expand(-1, LATENT).contiguous()
            self.cache.append_(layer, kv_c, -kv_c[:, :ROPE].contiguous(), slots)
        for row in range(batch):
            own = slots_of(slots, row, count)
            fitting = max(0, min(count, self.capacity(row) - len(self.tokens[row])))
            assert own[fitting:] == [-1] * (count - fitting)
            assert -1 not in own[:fitting]
            self.tokens[row] += values[row * count : row * count + fitting].tolist()

    @rule(row=st.integers(0, ROWS - 1))
    def free(self, row):
        self.cache.free(row)
        self.pages[row], self.tokens[row] = 0, []

    @precondition(lambda self: sum(self.pages) > 3)
    @rule()
    def reset(self):
        self.cache.reset()
        self.pages, self.tokens = [0] * ROWS, [[] for _ in range(ROWS)]

    @invariant()
    def agrees_with_the_model(self):
        if not hasattr(self, "cache"):
            return
        cache = self.cache
        assert addresses(cache) == self.addresses
        assert cache.cache_seqlens.tolist() == [len(tokens) for tokens in self.tokens]
        assert cache.capacity.tolist() == [self.capacity(row) for row in range(ROWS)]
        owned = [
            page
            for row in range(ROWS)
            for page in cache.block_table[row, : self.pages[row]].tolist()
        ]
        assert len(set(owned)) == len(owned), "a page is owned twice"
        assert all(0 <= page < PAGES for page in owned)
        for row, tokens in enumerate(self.tokens):
            position = torch.arange(len(tokens))
            page = cache.block_table[row, position // self.page_size].long()
            for layer in range(2):
                held = cache.kv_cache(layer)[page, position % self.page_size, 0]
                wanted = torch.tensor(tokens).view(-1, 1) + 1000 * layer
                assert torch.equal(held, wanted * torch.tensor([1.0] * LATENT + [-1.0] * ROPE))


CacheMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=20, deadline=None, derandomize=True, database=None
)
TestCacheMachine = CacheMachine.TestCase
