"""Random small programs over a paged cache, as text: drawn by hypothesis, run eager and compiled.

A program is what a person could write: views and copies of the caches it is given, appends,
in-place aten writes, metadata, decodes, merges. It is drawn with the shapes of its variables in
mind, so that it is legal; whether torch.compile keeps its meaning is the question.
"""

from typing import NamedTuple

from differential import HOLDERS, Program
from hypothesis import strategies as st
from pools import HEAD_DIM, LATENT, PAGE_SIZE, PAGES


class Cache(NamedTuple):
    """What the generator knows about a variable of the program."""

    pages: int
    page_size: int
    contiguous: bool


def _views(name, cache):
    pages, size, contiguous = cache
    half = max(pages // 2, 1)
    views = [
        (f"{name}[:{half}]", Cache(half, size, contiguous)),
        (f"{name}[{pages - half}:]", Cache(half, size, contiguous)),
        (f"{name}[1:{pages}]", Cache(pages - 1, size, contiguous)),
        (f"{name}[::2]", Cache(-(-pages // 2), size, False)),
        (f"{name}.narrow(0, {pages - half}, {half})", Cache(half, size, contiguous)),
        (f"{name}.split({half})[0]", Cache(half, size, contiguous)),
        (f"{name}[:, :{max(size // 2, 1)}]", Cache(pages, max(size // 2, 1), False)),
        (f"{name}[:, {size // 2}:]", Cache(pages, size - size // 2, False)),
        (f"{name}.transpose(0, 1)", Cache(size, pages, False)),
        (f"{name}.squeeze(2).unsqueeze(2)", cache),
        (f"{name}.unsqueeze(0)[0]", cache),
        (f"{name}.detach()", cache),
        (f"{name}[:]", cache),
    ]
    if contiguous:
        views.append(
            (f"{name}.view({pages * size}, 1, 1, {HEAD_DIM})", Cache(pages * size, 1, True))
        )
        views.append((f"{name}.flatten(0, 1).unflatten(0, ({pages}, {size}))", cache))
        if pages % 2 == 0:
            shape = f"{pages // 2}, {size * 2}, 1, {HEAD_DIM}"
            views.append((f"{name}.view({shape})", Cache(pages // 2, size * 2, True)))
    return [view for view in views if view[1].pages > 0]


_COPIES = (
    "{0}.clone()",
    "{0}[1:].clone()",
    "{0}.clone()[:]",
    "{0}.contiguous()",
    "{0}.to({0}.dtype, copy=True)",
    "torch.empty_like({0}).copy_({0})",
    "torch.cat([{0}])",
    "torch.stack([{0}])[0]",
    "{0}.repeat(1, 1, 1, 1)",
    "torch.nn.functional.pad({0}, (0, 0))",
    "{0} + 0",
    "{0} * 1",
    "torch.where({0} > 0, {0}, {0})",
    "{0}.flip(0).flip(0)",
    "{0}.expand_as({0}).clone()",
    "torch.zeros_like({0}).add_({0})",
)
_WRITES = (
    "{0}.mul_(0.5)",
    "{0}.add_(1.0)",
    "{0}[0].fill_(7.0)",
    "{0}[:, 0].zero_()",
    "{0}[-1:] = 3.0",
)
_MOVES = ("{0}.copy_({0}.flip(0))", "{0}.copy_({0}.roll(1, 0))")
_READS = ("{0} + 0", "{0}[0] * 2", "{0}.sum()", "{0}.clone()")
_RETURNED_VIEWS = ("{0}", "{0}[-1:]")
_APPEND = "append_kv_({}, t.kv[{}], t.pe[{}], t.slots[{}])"
_DECODE = (
    "mla_decode(t.q, {}, t.table, t.lengths, {}, softmax_scale=0.1, head_dim_v="
    f"{LATENT}, causal=False{{}})"
)
_OUTPUTS = (
    ", out=t.out[:t.q.shape[0]], lse=t.lse[:t.q.shape[0]]",
    ", out=torch.empty_like(t.q[..., :128]), lse=t.q.new_empty(t.q.shape[0], 2, 1)",
)
_METADATA = ("mla_metadata(t.lengths, num_heads_q=2)", "buffers.update(t.lengths)")


class _Writer:
    """Draws one statement after the other and remembers what every variable is."""

    def __init__(self, draw, holder):
        self.draw, self.holder = draw, holder
        self.whole_inputs = HOLDERS[holder][1][0].endswith(("held", "held.pools"))
        self.lines = []
        self.caches = {name: Cache(PAGES, PAGE_SIZE, False) for name in ("c0", "c1")}
        self.states, self.plans, self.values = [], [], []

    def pick(self, options):
        return self.draw(st.sampled_from(list(options)))

    def new(self, kind):
        return f"{kind}{sum(line.startswith(kind) for line in self.lines) + 2}"

    def view(self):
        source = self.pick(self.caches)
        text, cache = self.pick(_views(source, self.caches[source]))
        self._cache(text, cache)

    def copy(self):
        source = self.pick(self.caches)
        text, cache = self.pick(_COPIES), self.caches[source]
        if "[1:]" in text:
            cache = cache._replace(pages=cache.pages - 1)
        if cache.pages:
            self._cache(text.format(source), cache)

    def _cache(self, text, cache):
        name = self.new("c")
        self.lines.append(f"{name} = {text}")
        self.caches[name] = cache

    def append(self):
        numbers = [self.draw(st.integers(0, 1)) for _ in range(2)]
        self.lines.append(_APPEND.format(self.pick(self.caches), numbers[0], *numbers))

    def write(self):
        if self.holder == "expanded":
            # AOTAutograd refuses aten writes of overlapping memory that eager inference allows.
            return
        name = self.pick(self.caches)
        # Moving elements within a view taken inside goes wrong in Inductor with aten alone
        # (canaries.py, moved_elements_of_a_view): a mutation that is not ours.
        whole = name in ("c0", "c1") and self.whole_inputs
        self.lines.append(self.pick(_WRITES + _MOVES * whole).format(name))

    def copy_across(self):
        target, source = self.pick(self.caches), self.pick(self.caches)
        same_shape = self.caches[target][:2] == self.caches[source][:2]
        if same_shape and self.holder != "expanded":
            self.lines.append(f"{target}.copy_({source})")

    def read(self):
        name = self.new("v")
        # AOTAutograd fails on views returned of inputs that share a storage, with aten alone too.
        reads = _READS + _RETURNED_VIEWS * (self.holder != "sibling_inputs")
        self.lines.append(f"{name} = {self.pick(reads).format(self.pick(self.caches))}")
        self.values.append(name)

    def metadata(self):
        name = self.new("m")
        self.lines.append(f"{name} = {self.pick(_METADATA)}")
        self.plans.append(name)
        value = self.new("v")
        self.lines.append(f"{value} = {name}.num_splits + 0")
        self.values.append(value)

    def lengths(self):
        self.lines.append(self.pick(("t.lengths.add_(1)", "t.lengths.mul_(2)")))

    def decode(self):
        outputs = ["", "", *_OUTPUTS]
        outputs += [f", out={state}.out, lse={state}.lse" for state in self.states]
        plan = self.pick([None, *self.plans])
        name = self.new("s")
        call = _DECODE.format(self.pick(self.caches), plan, self.pick(outputs))
        self.lines.append(f"{name} = {call}")
        self.states.append(name)
        self.values += [f"{name}.out", f"{name}.lse"]

    def merge(self):
        if self.states:
            pair = self.pick(self.states), self.pick(self.states)
            outs, lses = (", ".join(f"{s}.{part}" for s in pair) for part in ("out", "lse"))
            name = self.new("s")
            self.lines.append(
                f"{name} = merge_states(torch.stack([{outs}]), torch.stack([{lses}]))"
            )
            self.states.append(name)
            self.values += [f"{name}.out", f"{name}.lse"]


_STATEMENTS = (
    *(["append"] * 5 + ["view"] * 4 + ["copy"] * 3 + ["decode"] * 3 + ["read"] * 2),
    *("write", "copy_across", "metadata", "metadata", "lengths", "merge"),
)


@st.composite
def programs(draw, backends=("inductor", "inductor", "inductor", "aot_eager")):
    """Draw a program of 2 to 9 statements with at least one mutation through an operator."""
    holder = draw(st.sampled_from(sorted(HOLDERS)))
    writer = _Writer(draw, holder)
    if holder not in ("padded", "expanded"):
        writer.caches = {name: Cache(PAGES, PAGE_SIZE, True) for name in ("c0", "c1")}
    for _ in range(draw(st.integers(1, 8))):
        getattr(writer, draw(st.sampled_from(_STATEMENTS)))()
    writer.append()
    returned = draw(st.sets(st.sampled_from(writer.values))) if writer.values else ()
    return Program(
        holder=holder,
        lines=tuple(writer.lines),
        returns=tuple(sorted(returned)),
        dynamic=draw(st.booleans()),
        # Mutating inputs that share a storage fails in Inductor there, with aten alone too.
        inference_mode=draw(st.booleans()) and holder != "sibling_inputs",
        backend=draw(st.sampled_from(backends)),
    )
