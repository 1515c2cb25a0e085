"""The built-in prompt set: its size and fields, and that held-out prompts are new to a trainer."""

import json
import re
from collections import Counter
from pathlib import Path

PROMPTS = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "assets/prompts.jsonl").read_text().splitlines()
]


def texts(split: str) -> list[str]:
    return [prompt["turns"][0] for prompt in PROMPTS if prompt["split"] == split]


def trigrams(text: str) -> set[tuple[str, ...]]:
    """Word trigrams with numbers masked, so that one template with other numbers is the same."""
    words = re.findall(r"[^\W\d_]+|#", re.sub(r"\d+(?:[.,:]\d+)*", "#", text.lower()))
    return {tuple(words[i : i + 3]) for i in range(len(words) - 2)}


def overlap(text: str, other: str) -> float:
    """The share of the shorter prompt's trigrams that the longer one holds too."""
    a, b = trigrams(text), trigrams(other)
    return len(a & b) / max(1, min(len(a), len(b)))


def test_fields():
    for prompt in PROMPTS:
        assert prompt.keys() == {"turns", "topic", "split"}
        (turn,) = prompt["turns"]
        assert turn == turn.strip() and 10 < len(turn) < 600


def test_counts_by_topic_and_split():
    counts = Counter((prompt["split"], prompt["topic"]) for prompt in PROMPTS)
    train = {("train", "math"): 66, ("train", "code"): 50, ("train", "general"): 84}
    heldout = {
        ("validation", "math"): 14,
        ("validation", "code"): 10,
        ("validation", "general"): 16,
    }
    assert counts == train | heldout


def test_prompts_are_distinct():
    assert len({frozenset(trigrams(p["turns"][0])) for p in PROMPTS}) == len(PROMPTS)


def test_overlap_sees_a_template_with_other_numbers():
    text = "A cube has edges of 4 centimeters. What is its volume?"
    assert overlap(text, text.replace("4", "7.5")) == 1.0
    assert overlap(text, "Why do cats purr when they sleep?") == 0.0


def test_heldout_prompts_are_no_variants_of_train_prompts():
    for text in texts("validation"):
        closest = max(texts("train"), key=lambda other: overlap(text, other))
        assert overlap(text, closest) <= 0.3, f"{text!r} is too close to {closest!r}"
