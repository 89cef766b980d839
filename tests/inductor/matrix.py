"""Running holders by every compiler, and the table of what became of them on one torch."""

import os
import re
from pathlib import Path

import torch
from holders import HOLDERS, state
from pools import make_pool, make_tokens

from mla_ops import inductor
from mla_ops._torch_compile import caches_off
from mla_ops.diagnostics.measure import measuring

TABLES = Path(__file__).parent.parent.parent / "scripts" / "results" / "holders.md"
COLUMNS = ("eager", "aot_eager", "inductor", "pool copies", "without the passes", "CUDA graph")
# The batch of its buffer is fixed.
STATIC_ONLY = ("outputs_in_one_buffer",)
REFUSAL = re.compile(r"\b(append_kv_|mla_decode|mla_decode_out): .*must be .*\(.+\)", re.DOTALL)


def run(holder, backend, dynamic, *, batches=(3, 2), repeat=False, device="cpu", **options):
    """Run a few batches eagerly and compiled on separate memory; return the two traces.

    Static shapes serve the first batch only, unless all are to ``repeat`` its size.
    """
    pool = make_pool(device=device)
    ours, theirs = holder.prepare(pool.clone()), holder.prepare(pool.clone())
    torch._dynamo.reset()
    compiled = torch.compile(
        holder.step, backend=backend, fullgraph=True, dynamic=dynamic, **options
    )
    traces = []
    # A cached graph of an earlier version would hide what this one does.
    with torch.inference_mode(), caches_off():
        for step, batch in enumerate(batches if dynamic or repeat else batches[:1]):
            tokens = make_tokens(3, seed=batch + step * repeat, device=device)
            tokens = type(tokens)(*(tensor[:batch] for tensor in tokens))
            for held, call, trace in ((ours, compiled, []), (theirs, holder.step, [])):
                trace.extend(tensor.clone() for tensor in call(held, tokens))
                trace.extend(tensor.clone() for tensor in state(held))
                traces.append(trace)
    return traces[0::2], traces[1::2]


def equal(ours, theirs):
    return all(
        torch.allclose(got, expected, rtol=1e-5, atol=1e-5)
        for mine, eager in zip(ours, theirs, strict=True)
        for got, expected in zip(mine, eager, strict=True)
    )


def outcome(holder, backend, dynamic, **options):
    """Return "ok", "wrong", or "refused" when a message of ours ended the compilation."""
    try:
        ours, theirs = run(holder, backend, dynamic, **options)
    except Exception as error:
        return "refused" if REFUSAL.search(str(error)) else f"failed: {type(error).__name__}"
    return "ok" if equal(ours, theirs) else "wrong"


def eager_outcome(holder, device):
    try:
        held = holder.prepare(make_pool(device=device))
        with torch.inference_mode():
            holder.step(held, make_tokens(3, device=device))
    except ValueError as error:
        return "refused" if REFUSAL.search(str(error)) else "failed"
    return "ok"


def measured_outcome(holder, dynamic, device):
    """Return the outcome by Inductor, and how many copies of half a layer or more it makes."""
    half_a_layer = make_pool()[0].nbytes // 2
    with measuring(half_a_layer) as recorder:
        result = outcome(holder, "inductor", dynamic, device=device)
    clones = recorder.result().clones
    return result, "-" if result != "ok" else "?" if clones is None else str(len(clones))


def outcome_without_passes(holder, dynamic, device):
    inductor.uninstall()
    os.environ["MLA_OPS_INDUCTOR_PASS"] = "0"
    try:
        return outcome(holder, "inductor", dynamic, device=device)
    finally:
        del os.environ["MLA_OPS_INDUCTOR_PASS"]


def captured_outcome(holder, dynamic, device):
    """Return the outcome under reduce-overhead, and whether a CUDA graph was recorded."""
    if device == "cpu":
        return "-"
    with measuring() as recorder:
        # Warm-up, recording, replay.
        result = outcome(
            *(holder, "inductor", dynamic),
            device=device,
            mode="reduce-overhead",
            batches=(3, 3, 3),
            repeat=True,
        )
    seen = recorder.result()
    if result != "ok" or seen.captured:
        return f"{result}, recorded" if result == "ok" else result
    reason = seen.reasons[0] if seen.reasons else "not recorded"
    return "ok, " + reason.replace("skipping cudagraphs due to", "skipped:").partition(" (")[0]


def rows_of(name, device="cpu"):
    """Run one holder; return [((name, shapes), cells)]."""
    holder = next(each for each in HOLDERS if each.name == name)
    result = []
    for dynamic in (False,) if name in STATIC_ONLY else (False, True):
        cells = (
            eager_outcome(holder, device),
            outcome(holder, "aot_eager", dynamic, device=device),
            *measured_outcome(holder, dynamic, device),
            outcome_without_passes(holder, dynamic, device),
            captured_outcome(holder, dynamic, device),
        )
        result.append(((name, "dynamic" if dynamic else "static"), cells))
    return result


def title(device="cpu"):
    where = "CPU" if device == "cpu" else torch.cuda.get_device_name()
    return f"## torch {torch.__version__.split('+')[0]}, {where}"


def render(table):
    """Write {(holder, shapes): cells} as Markdown."""
    lines = [f"| holder | shapes | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
    lines += [f"| {' | '.join((*key, *cells))} |" for key, cells in table.items()]
    return "\n".join(lines)


def read_tables(path=TABLES):
    """Return {title: {(holder, shapes): {column: cell}}} of the committed file."""
    tables = {}
    for line in path.read_text().splitlines():
        if line.startswith("## "):
            table = tables[line] = {}
        elif line.startswith("| ") and not line.startswith("| holder"):
            name, shapes, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            table[name, shapes] = dict(zip(COLUMNS, cells, strict=True))
    return tables
