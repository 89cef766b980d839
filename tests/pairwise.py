"""Covering arrays: few rows in which every two values of different axes meet."""

from itertools import combinations, product


def covering_rows(axes):
    """Return dicts, one value per axis, so that every pair of values occurs in one at least.

    Greedy and deterministic: a row starts from a pair not covered yet, then each further axis
    takes the value that covers most.
    """
    names = list(axes)
    missing = {
        ((a, i), (b, j))
        for a, b in combinations(names, 2)
        for i, j in product(range(len(axes[a])), range(len(axes[b])))
    }
    rows = []
    while missing:
        row = dict(min(missing, key=lambda pair: [(names.index(n), i) for n, i in pair]))
        for name in names:
            if name not in row:
                gains = [
                    sum(pair in missing for pair in _pairs(names, {**row, name: index}, name))
                    for index in range(len(axes[name]))
                ]
                # Ties go round, so that values nobody needs any more vary as well.
                best = [index for index, gain in enumerate(gains) if gain == max(gains)]
                row[name] = best[len(rows) % len(best)]
        missing -= {((a, row[a]), (b, row[b])) for a, b in combinations(names, 2)}
        rows.append({name: axes[name][row[name]] for name in names})
    return rows


def _pairs(names, row, name):
    for other in row:
        if other != name:
            a, b = sorted((other, name), key=names.index)
            yield (a, row[a]), (b, row[b])
