"""Reading compiled programs: the collectives they hold, how often each runs, what it moves.

XLA has no interface for this, so the text of the program is read. Nothing here compiles.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "ragged-all-to-all",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# One line each: `ENTRY %main (x: f32[2]) -> f32[2] {` and `%name = f32[2]{0} kind(%x), calls=%f`.
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = ")
_COLLECTIVE = re.compile(rf"= (.+?) ({'|'.join(KINDS)})(-start)?\(")
_RESULT = re.compile(r"= (.+?) [a-z][\w\-]*\(")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_CALLED = re.compile(r"(?:calls|to_apply|condition|body|\w+_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_WHILE = re.compile(r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_KNOWN_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,]*)\]")
_LESS = re.compile(r" compare\(%?([\w.\-]+), %?([\w.\-]+)\), direction=LT")
_ELEMENT = re.compile(r" get-tuple-element\(.*\), index=(\d+)")
_CONSTANT = re.compile(r" constant\((\d+)\)")
_TUPLE = re.compile(r" tuple\((.*?)\)(?:,|$)")
_COPY = re.compile(r" copy\(%?([\w.\-]+)\)")
_SUM = re.compile(r" add\(%?([\w.\-]+), %?([\w.\-]+)\)")
_NOTE = re.compile(r"/\*.*?\*/")

Lines = list[str]


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
      kind: one of `KINDS`.
      elements: of the largest array it gives, on one device.
      bytes: of all arrays it gives, on one device.
      times: how often a run of the program executes it. A loop of unknown length counts once, and
        every branch of a conditional as if it were taken.
      types: of the arrays, sorted, such as ("bf16", "f32").
    """

    kind: str
    elements: int
    bytes: int
    times: int
    types: tuple[str, ...]


def find_collectives(text: str) -> list[Collective]:
    """The collectives in the text of a compiled program (`compiled.as_text()`)."""
    entry, computations = _computations(text.splitlines())
    times = _times(entry, computations)
    on_tpu = ":T(" in text  # tiles in the layouts
    found: dict[Any, Collective] = {}
    for name, lines in computations.items():
        for number, line in enumerate(lines):
            if match := _COLLECTIVE.search(line):
                channel = _CHANNEL.search(line)
                kind, result, start = match[2], match[1], match[3] is not None
                fused = _RESULT.search(_instructions(lines)[1])
                if name.startswith("all-reduce-scatter") and fused:
                    # How TPUs write one: the whole sum, of which a fusion keeps this device's part.
                    kind, result = "reduce-scatter", fused[1]
                one = _collective(kind, result, start, times[name])
                # TPUs hide one behind several fusions, each of which names it with its channel; on
                # CPU, which does not, all those of a `shard_map` have the same.
                key = (channel[1], kind, one.elements) if channel and on_tpu else (name, number)
                found.setdefault(key, one)
    return list(found.values())


def collectives(compiled: Any) -> dict[str, int]:
    """Collectives of a compiled function by kind; one in a loop's body counts once."""
    found = find_collectives(compiled.as_text())
    return dict(collections.Counter(collective.kind for collective in found))


def largest_result(compiled: Any, kind: str) -> int:
    """Elements of the largest array that a collective of this kind gives."""
    found = find_collectives(compiled.as_text())
    return max(collective.elements for collective in found if collective.kind == kind)


def _collective(kind: str, result: str, start: bool, times: int) -> Collective:
    """A collective whose result is of a type such as `(f32[2,3]{1,0}, u32[])`."""
    arrays = [
        (math.prod(int(n) for n in shape.split(",") if n), letters, digits)
        for letters, digits, shape in _ARRAY.findall(result)
    ]
    if start and kind != "all-reduce":
        # An asynchronous one's start gives its operands, its results, and scalars of its own.
        arrays = [array for array in arrays if array[0] > 1] or arrays
        arrays = arrays[len(arrays) // 2 :]
    return Collective(
        kind,
        max(elements for elements, *_ in arrays),
        sum(-(-elements * _bits(*kind) // 8) for elements, *kind in arrays),
        times,
        tuple(sorted({letters + digits for _, letters, digits in arrays})),
    )


def _bits(letters: str, digits: str) -> int:
    return 8 if letters == "pred" else int(digits or 0)


def _computations(lines: Iterable[str]) -> tuple[str, dict[str, Lines]]:
    """The name of the computation that a program begins with, and the lines of every one."""
    entry, found, body = "", {}, []
    for line in lines:
        if match := _COMPUTATION.match(line):
            body = found[match[2]] = []
            entry = match[2] if match[1] else entry
        else:
            body.append(line)
    return entry, found


def _times(entry: str, computations: dict[str, Lines]) -> dict[str, int]:
    """How often each computation runs."""
    callers: dict[str, list[tuple[str, int]]] = collections.defaultdict(list)
    for name, lines in computations.items():
        for line in lines:
            for called, times in _calls(line, computations):
                callers[called].append((name, times))
    found = {entry: 1}

    def count(name: str) -> int:
        if name not in found:
            found[name] = sum(times * count(caller) for caller, times in callers[name])
        return found[name]

    return {name: count(name) for name in computations}


def _calls(line: str, computations: dict[str, Lines]) -> Iterator[tuple[str, int]]:
    """The computations that an instruction runs, and how often."""
    trips = 1
    if loop := _WHILE.search(line):
        known = _KNOWN_TRIPS.search(line)
        trips = (
            int(known[1]) if known else _trips(*(computations.get(x, []) for x in loop.groups()))
        )
    for called in _CALLED.findall(line):
        yield called, trips
    if branches := _BRANCHES.search(line):
        for called in branches[1].split(","):
            yield called.strip().removeprefix("%"), 1


def _trips(condition: Lines, body: Lines) -> int:
    """How often a loop runs that counts from 0 up to a constant, as scans do; 1 for others.

    The TPU compiler unrolls some and does not say how often they run.
    """
    tests, test = _instructions(condition)
    steps, step = _instructions(body)
    if not (less := _LESS.search(test)):
        return 1
    counter = _ELEMENT.search(tests.get(less[1], ""))
    limit = _CONSTANT.search(tests.get(less[2], ""))
    results = _TUPLE.search(_NOTE.sub("", step))
    if not (counter and limit and results):
        return 1
    advanced = results[1].split(",")[int(counter[1])].strip().removeprefix("%")
    while copied := _COPY.search(steps.get(advanced, "")):
        advanced = copied[1]
    terms = _SUM.search(steps.get(advanced, ""))
    by = terms and next(
        filter(None, (_CONSTANT.search(steps.get(x, "")) for x in terms.groups())), None
    )
    return -(-int(limit[1]) // int(by[1])) if by else 1


def _instructions(lines: Lines) -> tuple[dict[str, str], str]:
    """The instructions of a computation by name, and the one whose result is its own."""
    named = {match[2]: line for line in lines if (match := _INSTRUCTION.match(line))}
    return named, next((line for line in lines if line.lstrip().startswith("ROOT ")), "")
