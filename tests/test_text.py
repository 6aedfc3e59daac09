"""Pieces concatenate to the text, the text is the tokenizer's own, and a stop string ends it at the right character."""

import numpy as np
import pytest
import torch
from conftest import make_target
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from flashspec_core.engine.text import TextStream, encode_prompts

HARD = "Zoë paid 5 € for naïve 日本語 🙂👨‍👩‍👧‍👦 (flag: 🇨🇭), e\u0301 and \ttabs\n\n  spaces  .  End"


def run(tokenizer, ids, stop=()):
    """All of a stream: the stream, its pieces and how many ids it took."""
    stream, pieces, taken = TextStream(tokenizer, stop), [], 0
    for token_id in ids:
        taken += 1
        stopped = stream.push(token_id)
        pieces.append(stream.piece())
        if stopped:
            break
    pieces.append(stream.piece(final=True))
    return stream, pieces, taken


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return smollm2.tokenizer


@pytest.fixture
def target(smollm2):
    return smollm2


def test_text_equals_the_tokenizers_and_pieces_concatenate(tokenizer):
    @given(st.text("🙂é日本 aZ\n\u200d👩👧\ufffd", max_size=30))
    def check(text):
        stream, pieces, _ = run(tokenizer, tokenizer(text).input_ids)
        assert "".join(pieces) == stream.text == text
        assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")

    check()


def test_any_ids_give_the_tokenizers_text(tokenizer):
    """Also ids that are no valid UTF-8, and special ones."""

    @given(st.lists(st.one_of(st.integers(0, 300), st.integers(0, len(tokenizer) - 1)), max_size=30))
    def check(ids):
        stream, pieces, _ = run(tokenizer, ids)
        wanted = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert "".join(pieces) == stream.text == wanted

    check()


def test_a_split_character_is_held_back_until_it_is_whole(tokenizer):
    ids = tokenizer("👩").input_ids
    stream, shown = TextStream(tokenizer), []
    for token_id in ids:
        stream.push(token_id)
        shown.append(stream.piece())
    assert len(ids) > 1 and shown == [""] * (len(ids) - 1) + ["👩"]


def test_a_character_that_never_becomes_whole_comes_at_the_end(tokenizer):
    ids = tokenizer("ab 👩").input_ids[:-1]
    stream, pieces, _ = run(tokenizer, ids)
    assert pieces[-1].endswith("\ufffd") and "".join(pieces) == stream.text == tokenizer.decode(ids)


def test_a_stop_string_ends_at_its_character_wherever_it_stands(tokenizer):
    ids = tokenizer(HARD).input_ids

    @given(st.integers(0, len(HARD) - 1), st.integers(1, 9), st.booleans())
    def check(begin, length, two):
        stop = HARD[begin : begin + length]
        stream, pieces, taken = run(tokenizer, ids, (stop, "never to be seen") if two else (stop,))
        assert stream.stopped and "".join(pieces) == stream.text == HARD[: HARD.index(stop)]
        assert stop in tokenizer.decode(ids[:taken]) and stop not in tokenizer.decode(ids[: taken - 1])

    check()


def test_a_stop_string_that_spans_pushes_is_never_shown(tokenizer):
    ids = [i for part in ("one", " ST", "O", "P", " two") for i in tokenizer(part).input_ids]
    stream, pieces, taken = run(tokenizer, ids, (" STOP",))
    assert (stream.text, "".join(pieces), taken) == ("one", "one", len(ids) - len(tokenizer(" two").input_ids))
    stream, pieces, _ = run(tokenizer, tokenizer("one STO").input_ids, (" STOP",))
    assert "".join(pieces) == stream.text == "one STO" and not stream.stopped  # only its beginning: shown at the end


def test_the_earliest_of_several_stop_strings_counts(tokenizer):
    stream, _, _ = run(tokenizer, tokenizer("abc def ghi").input_ids, ("ghi", "def", " ghi"))
    assert stream.text == "abc "
    (the,) = tokenizer(" the").input_ids  # one push completes all three
    assert [run(tokenizer, [the], stop)[0].text for stop in (("h", "e"), ("e", "h"), ("e", "he"))] == [" t"] * 3


def test_spaces_between_words_stay_where_the_tokenizer_strips_the_first():
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(("▁one", "▁two", "▁three", "s"))}))
    words.decoder = decoders.Metaspace()
    stream, pieces, _ = run(PreTrainedTokenizerFast(tokenizer_object=words), [0, 1, 3, 2])
    assert pieces == ["one", " two", "s", " three", ""] and stream.text == "one twos three"


def test_without_a_tokenizer_the_text_stays_empty():
    stream, pieces, taken = run(None, [1, 2, 3])
    assert (stream.text, pieces, taken, stream.stopped) == ("", [""] * 4, 3, False)


MESSAGES = [{"role": "user", "content": "Hé 🙂?"}]


def test_every_form_of_a_prompt(target):
    text_ids = target.tokenizer("Hé 🙂?").input_ids
    chat_ids = target.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True).input_ids
    rendered = target.tokenizer.decode(chat_ids)
    assert "user\nHé 🙂?" in rendered and rendered.rstrip().endswith("assistant")
    forms = [
        ("Hé 🙂?", text_ids),
        (MESSAGES, chat_ids),
        (text_ids, text_ids),
        (tuple(text_ids), text_ids),
        (torch.tensor(text_ids), text_ids),
        (np.array(text_ids), text_ids),
    ]
    for prompt, ids in forms:
        assert encode_prompts(target, prompt) == ([ids], False)
        assert encode_prompts(target, [prompt]) == ([ids], True)
    assert encode_prompts(target, [prompt for prompt, _ in forms]) == ([ids for _, ids in forms], True)
    assert encode_prompts(target, torch.tensor([[1, 2], [3, 4]])) == ([[1, 2], [3, 4]], True)


@pytest.mark.parametrize("prompt", ["", [], (), [[]], [[1], []], ["a", ""], torch.tensor([], dtype=torch.int64)])
def test_an_empty_prompt_is_refused(target, prompt):
    with pytest.raises(ValueError, match="expected (a prompt of )?at least one"):
        encode_prompts(target, prompt)


@pytest.mark.parametrize("prompt", [None, 7, 1.5, {"role": "user"}, b"text", [None], [1.5], torch.tensor(3), object()])
def test_another_type_is_refused(target, prompt):
    with pytest.raises(TypeError):
        encode_prompts(target, prompt)


def test_ids_outside_the_vocabulary_are_refused_with_their_row():
    target = make_target(layers=1)
    for bad in (-1, 101, True, "x", None):
        with pytest.raises(ValueError, match=rf"ids in 0..100, got {bad!r} \(row 1\)"):
            encode_prompts(target, [[1, 2], [3, bad]])
    assert encode_prompts(target, [0, 100])[0] == [[0, 100]]


def test_a_prompt_that_fills_the_context_is_refused():
    target = make_target(layers=1, max_position_embeddings=16)
    assert encode_prompts(target, [1] * 15)[0] == [[1] * 15]
    with pytest.raises(ValueError, match=r"shorter than the model's context of 16 tokens, got 16 \(row 1\)"):
        encode_prompts(target, [[1], [1] * 16])


@pytest.mark.parametrize("prompt", ["text", MESSAGES, [[1], "text"]])
def test_text_without_a_tokenizer_is_refused(llama, prompt):
    with pytest.raises(ValueError, match="the target has no tokenizer; got text"):
        encode_prompts(llama, prompt)
