"""Speedups that papers state, for columns beside one's own. None of them was measured here.

Other hardware, software, drafters and prompts than one's own: they say where the field is, not how
a run compares. Speedups are over plain decoding at temperature 0, one request at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from d3d_jax.commands.benchmark_options import OVERALL

NOTE = "published, not measured here"


@dataclasses.dataclass(frozen=True)
class Published:
    """What one source states of one method.

    Attributes:
      speedups, taus: by task; `OVERALL` is the source's own average over its tasks.
      source: where it stands and what it was measured on, as far as that is stated.
    """

    name: str
    source: str
    speedups: Mapping[str, float]
    taus: Mapping[str, float] = dataclasses.field(default_factory=dict)


_SEVEN = ("gsm8k", "math500", "aime25", "humaneval", "mbpp", "livecodebench", "mt-bench", OVERALL)


def _seven(*values: float) -> dict[str, float]:
    return dict(zip(_SEVEN, values, strict=True))


PUBLISHED = (
    Published(
        "D3D, Qwen3-8B",
        "arXiv 2611.06425: Transformers, two GPUs (target and drafter), average of 7 tasks",
        {"mt-bench": 2.68, OVERALL: 5.00},
        {OVERALL: 7.88},
    ),
    Published(
        "D3D, Qwen3-32B",
        "arXiv 2611.06425: Transformers, two GPUs (target and drafter), average of 7 tasks",
        {
            "gsm8k": 7.48,
            "math500": 7.46,
            "humaneval": 6.22,
            "mbpp": 5.71,
            "mt-bench": 3.01,
            OVERALL: 5.71,
        },
        {OVERALL: 7.73},
    ),
    Published(
        "DFlash, Qwen3-8B",
        "arXiv 2602.06036: Transformers, one H200, thinking off",
        _seven(5.15, 6.08, 5.62, 5.14, 4.65, 5.51, 2.75, 4.86),
        _seven(6.54, 7.87, 7.08, 6.50, 5.95, 7.27, 4.24, 6.49),
    ),
    Published(
        "PARD (0.6B), Qwen3-8B",
        "arXiv 2605.08632: vLLM 0.16, A100, thinking off, average of 3 tasks",
        {"humaneval": 5.05, "gsm8k": 4.40, "mt-bench": 2.52, OVERALL: 3.99},
    ),
    Published(
        "PARD-2, Qwen3-8B",
        "arXiv 2605.08632: vLLM 0.16, A100, thinking off, average of 3 tasks",
        {"humaneval": 6.75, "gsm8k": 6.44, "mt-bench": 3.16, OVERALL: 5.45},
    ),
)
