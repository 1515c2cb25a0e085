"""What work in a folder was begun with, against what it is asked to go on with."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any


def difference(
    theirs: dict[str, Any], ours: dict[str, Any], ignored: Collection[str] = ()
) -> str | None:
    """The first setting that differs, as "seed 5, and this one has 6"; None: they are the same.

    Args:
      theirs, ours: as JSON types; objects within are compared by their own settings.
      ignored: names, of any object, that need not agree.
    """
    found = _difference(theirs, ours, ignored)
    if found is None:
        return None
    name, old, new = found
    return f"{name} {_short(old)}, and this one has {_short(new)}"


def _difference(
    theirs: dict[str, Any], ours: dict[str, Any], ignored: Collection[str]
) -> tuple[str, Any, Any] | None:
    for name in dict.fromkeys((*theirs, *ours)):
        old, new = theirs.get(name), ours.get(name)
        if name in ignored or old == new:
            continue
        if not (isinstance(old, dict) and isinstance(new, dict)):
            return name.replace("_", " "), old, new
        if (inner := _difference(old, new, ignored)) is not None:
            return f"{name.replace('_', ' ')} {inner[0]}", *inner[1:]
    return None


def _short(value: Any) -> str:
    return f"{json.dumps(value, ensure_ascii=False):.80}"
