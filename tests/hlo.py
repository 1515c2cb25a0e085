"""Reading compiled programs: which collectives they hold."""

import collections
import math
import re

_COLLECTIVE = re.compile(
    r"= (.+?) (all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute"
    r"|collective-broadcast)(?:-start)?\("
)


def collectives(compiled) -> dict[str, int]:
    """Collectives of a compiled function by kind; one in a loop's body counts once."""
    return dict(collections.Counter(kind for _, kind in _COLLECTIVE.findall(compiled.as_text())))


def largest_result(compiled, kind: str) -> int:
    """Elements of the largest array that a collective of this kind gives."""
    shapes = [
        re.findall(r"\w+\[([\d,]*)\]", result)
        for result, found in _COLLECTIVE.findall(compiled.as_text())
        if found == kind
    ]
    return max(math.prod(int(n) for n in s.split(",") if n) for found in shapes for s in found)
