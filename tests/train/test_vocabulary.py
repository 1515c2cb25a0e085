"""The draft vocabulary: frequent response tokens, prompts not counted, lowest ids to fill up."""

import numpy as np
import pytest

from d3d_jax.errors import D3DError
from d3d_jax.train.vocabulary import frequent_tokens

DOCUMENTS = [
    {"tokens": np.array([9, 9, 9, 7, 5]), "prompt_length": 3},
    {"tokens": np.array([9, 5, 5, 8]), "prompt_length": 1},
]


def test_frequent_tokens_of_responses_come_first_and_low_ids_fill_up():
    assert frequent_tokens(DOCUMENTS, 10, 1).tolist() == [5]
    assert frequent_tokens(DOCUMENTS, 10, 2).tolist() == [5, 7], "of a tie the lowest id"
    assert frequent_tokens(DOCUMENTS, 10, 5).tolist() == [0, 1, 5, 7, 8], "9 is only in prompts"
    assert frequent_tokens(DOCUMENTS, 10, 10).tolist() == list(range(10))


@pytest.mark.parametrize("count", [0, 11])
def test_an_impossible_size_is_refused(count):
    with pytest.raises(D3DError, match="between 1 and 10"):
        frequent_tokens(DOCUMENTS, 10, count)
