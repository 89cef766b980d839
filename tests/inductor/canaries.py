"""Minimal reproductions of what torch does wrong with operators that mutate; torch alone.

Run it to see which faults the installed torch has: ``python tests/inductor/canaries.py`` prints
{name: whether the fault is there} as JSON. mla_ops mends or refuses them for its own operators,
but for two that it cannot see, moved_elements_of_a_view and reused_at_an_offset;
tests/inductor/test_canaries.py says from which version on torch needs no help.
"""

import json
import warnings

import torch
from torch._inductor.utils import run_and_get_code

lib = torch.library.Library("canary", "FRAGMENT")
lib.define("add_(Tensor(a!) x, float value) -> ()")
lib.define("add_both_(Tensor(a!) x, Tensor(b!) y) -> ()")
lib.impl("add_", lambda x, value: (x.add_(value), None)[1], "CompositeExplicitAutograd")
lib.impl("add_both_", lambda x, y: (x.add_(1), y.add_(2), None)[2], "CompositeExplicitAutograd")
torch.library.register_fake("canary::add_", lambda x, value: None, lib=lib)
torch.library.register_fake("canary::add_both_", lambda x, y: None, lib=lib)
add_, add_both_ = torch.ops.canary.add_, torch.ops.canary.add_both_


def memory():
    return torch.arange(240.0).view(6, 8, 5)


def same(x):
    return x


def differs(step, *, given=same, backend="inductor", dynamic=False):
    """Compare all memory and all results of an eager and a compiled call."""
    ours, theirs = given(memory()), given(memory())
    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(step, backend=backend, dynamic=dynamic, fullgraph=True)(ours)
        expected = step(theirs)
    return [whole(x) for x in flat(ours, got)] != [whole(x) for x in flat(theirs, expected)]


def flat(given, results):
    return [*(given if isinstance(given, tuple) else (given,)), *(results or ())]


def whole(x):
    """All of the memory behind x, as numbers."""
    return [
        tuple(x.shape),
        torch.as_strided(x, (x.untyped_storage().nbytes() // 4,), (1,), 0).tolist(),
    ]


def copied_then_written(copy):
    """y is a copy of x, both are written: y must not become x."""

    def step(x):
        y = copy(x)
        add_(x, 1.0)
        add_(y, 2.0)
        return (y,)

    return differs(step)


def symbolic_offset():
    """A layer selected inside the region under dynamic shapes: the write lands in layer 0.

    aten.sym_storage_offset has no lowering; its fallback sees a tensor rebuilt without offset.
    """

    def step(x):
        for layer in range(6):
            add_(x[layer], float(layer))

    return differs(step, dynamic=True)


def absolute_offset():
    """A view of an input that begins inside its storage: the write lands behind its place.

    auto_functionalized_v2 replays the view at its absolute offset, on that input.
    """
    return differs(lambda x: add_(x[:2], 1.0), given=lambda x: x[3:], backend="aot_eager")


def reused_at_an_offset():
    """A graph traced with an input that begins its storage serves one that does not: no guard.

    A view of that input is replayed at its absolute offset. Inductor is right.
    """

    def step(x):
        add_(x.view(3, 40)[2], 1.0)

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    ours, theirs = memory(), memory()
    with torch.no_grad():
        for part in (slice(0, 3), slice(3, 6)):
            compiled(ours[part])
            step(theirs[part])
    return not torch.equal(ours, theirs)


def computed_before():
    """What is computed of an input before it is written is computed after.

    An operator that mutates takes its place before the readers of its argument are realised.
    """

    def step(pair):
        x, y = pair
        y.copy_(x * 2)
        add_(x, 2.0)

    return differs(step, given=lambda x: (x[:3].clone(), x[3:].clone()))


def moved_elements():
    """Elements of a mutated buffer are moved within it: a loop reads what it has written.

    Scheduler.fusable_weak_dep looks for reads by the buffer's first name only.
    """

    def step(x):
        add_(x, 1.0)
        x.copy_(x.flip(0))

    return differs(step)


def kept_between():
    """The value between two writes is returned: the second write changes it."""

    def step(x):
        add_(x, 1.0)
        y = x.clone()
        add_(x, 2.0)
        return (y,)

    return differs(step)


def copied_between():
    """The value between two writes is copied to another input: it gets the last value."""

    def step(pair):
        x, y = pair
        add_(x, 1.0)
        y.copy_(x)
        add_(x, 2.0)

    return differs(step, given=lambda x: (x[:3].clone(), x[3:].clone()))


def copied_before():
    """The first value of an input is copied to another input: it gets the last value."""

    def step(pair):
        x, y = pair
        z = x.sum()
        y.copy_(x)
        add_(x, 2.0)
        return (z,)

    return differs(step, given=lambda x: (x[:3].clone(), x[3:].clone()))


def moved_elements_of_a_view():
    """The same within a view, with no operator of ours: the loop reads what it has written."""

    def step(x):
        view = x[1:2].squeeze(0)
        flat = view.view(40)
        view.copy_(view.flip(0))
        return (torch.mm(flat.view(8, 5), x[0].t()),)

    return differs(step)


def two_views_of_one_storage():
    """One operator writes two inputs that are views of one storage: rows nobody wrote change."""
    return differs(lambda pair: add_both_(*pair), given=lambda x: (x[1:3], x[4:]))


def whole_base_cloned():
    """A copy of a slice is alive while its base is written: the base is cloned, not the slice."""

    def step(x):
        older = x[:1].clone()
        add_(x, 1.0)
        return (older * 2,)

    torch._dynamo.reset()
    with torch.no_grad():
        _, (code, *_) = run_and_get_code(torch.compile(step, fullgraph=True), memory())
    return "empty_strided_cpu((240, )" in code


CANARIES = {
    "clone": lambda: copied_then_written(torch.clone),
    "to_copy": lambda: copied_then_written(lambda x: x.to(x.dtype, copy=True)),
    "copy_into_empty": lambda: copied_then_written(lambda x: torch.empty_like(x).copy_(x)),
    "cat_of_one": lambda: copied_then_written(lambda x: torch.cat([x])),
    "repeat_once": lambda: copied_then_written(lambda x: x.repeat(1, 1, 1)),
    "pad_by_nothing": lambda: copied_then_written(lambda x: torch.nn.functional.pad(x, (0, 0))),
    "symbolic_offset": symbolic_offset,
    "absolute_offset": absolute_offset,
    "reused_at_an_offset": reused_at_an_offset,
    "kept_between": kept_between,
    "copied_between": copied_between,
    "copied_before": copied_before,
    "computed_before": computed_before,
    "moved_elements": moved_elements,
    "moved_elements_of_a_view": moved_elements_of_a_view,
    "two_views_of_one_storage": two_views_of_one_storage,
    "whole_base_cloned": whole_base_cloned,
}


def main():
    warnings.filterwarnings("ignore")
    # A graph that another version of torch left behind would answer in place of this one.
    with torch._inductor.config.patch(fx_graph_cache=False):
        print(json.dumps({name: canary() for name, canary in CANARIES.items()}))


if __name__ == "__main__":
    main()
