"""Texts that end a reply: at one token in every mode, cut from the text, never shown in part."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d3d_jax.infer.loading import load_drafter
from d3d_jax.infer.model import load_model
from d3d_jax.infer.stop_strings import StopStrings, TextStream
from d3d_jax.sampling import SamplingParams
from tests.tiny_folders import write_drafter, write_target

PROMPT, NEW_TOKENS = [5, 6, 7], 12


class Letters:
    """A tokenizer whose token n is the n-th letter, as far as streams need one."""

    def stream(self):
        return self

    def feed(self, ids):
        return "".join("abc"[i] for i in ids)

    def flush(self):
        return ""


texts = st.text("abc", min_size=1, max_size=3)


@given(st.lists(st.integers(0, 2), max_size=24), st.lists(texts, min_size=1, max_size=3), st.data())
def test_any_stops_in_any_pieces_equal_a_search_of_the_whole_text(ids, stops, data):
    text = Letters().feed(ids)
    # The reply ends with the first letter that completes a stop string.
    ends = [i for i in range(len(text) + 1) if any(text[:i].endswith(s) for s in stops)]
    kept = ids[: ends[0]] if ends else ids
    found = [s for s in stops if text[: len(kept)].endswith(s)] if ends else []
    watch, stream = StopStrings(Letters(), stops), TextStream(Letters(), stops)
    told, shown, stop = [], "", None
    rest = list(ids)
    while rest and stop is None:
        size = data.draw(st.integers(1, len(rest)))
        new, stop = watch.cut(rest[:size])
        rest = rest[size:]
        told += new
        shown += stream.feed(new)
        assert text.startswith(shown)
    assert told == kept
    assert (stop is None) == (not ends) and (stop is None or stop in found)
    # Of stop strings that end together the longest begins first.
    cut = len(kept) - max(map(len, found), default=0)
    assert shown + stream.flush() == text[:cut]


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    root = tmp_path_factory.mktemp("stops")
    write_drafter(root / "drafter", write_target(root / "target"))
    model = load_model(root / "target")
    return model, load_drafter(model, root / "drafter")


@pytest.mark.parametrize("mode", ["plain", "sync", "async"])
def test_a_reply_ends_where_its_text_has_the_stop_string(case, mode):
    model, drafter = case
    (free,) = model.generate([PROMPT], max_new_tokens=NEW_TOKENS)
    whole = free.text
    stop = whole[len(whole) // 2 : len(whole) // 2 + 2]
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, stop=("nowhere to be found", stop))
    others = dataclasses.replace(sampling, stop=())
    cut, other = model.generate([PROMPT, PROMPT], drafter, mode=mode, sampling=[sampling, others])
    assert cut.text == whole[: whole.index(stop)] and other.text == whole
    assert (cut.reply.stop, cut.reply.finish_reason) == (stop, "stop")
    ids = cut.reply.token_ids
    assert ids == free.reply.token_ids[: len(ids)] and len(ids) < NEW_TOKENS
    shown = [model.tokenizer.stream().feed(part) for part in (ids, ids[:-1])]
    assert stop in shown[0] and stop not in shown[1]
    assert "".join(model.stream(PROMPT, drafter, mode=mode, sampling=sampling)) == cut.text


@pytest.mark.parametrize("mode", ["plain", "sync", "async"])
def test_a_request_has_stop_tokens_of_its_own(case, mode):
    model, drafter = case
    (free,) = model.generate([PROMPT], max_new_tokens=NEW_TOKENS)
    token = free.reply.token_ids[5]
    at = free.reply.token_ids.index(token)
    own = SamplingParams(max_new_tokens=NEW_TOKENS, stop_token_ids=(token,))
    both = [own, SamplingParams(max_new_tokens=NEW_TOKENS)]
    cut, whole = model.generate([PROMPT, PROMPT], drafter, mode=mode, sampling=both)
    assert cut.reply.token_ids == free.reply.token_ids[: at + 1]
    assert cut.reply.finish_reason == "stop"
    assert whole.reply.token_ids == free.reply.token_ids
