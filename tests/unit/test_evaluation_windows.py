"""Texts are cut so that every token is predicted once, by as much context as was asked for."""

from __future__ import annotations

import pytest

from llorch_serve.evaluation.windows import own_tokens, pieces, windows
from support.harness.worker import TOKENIZER

TEXT = "hello there, who is it that comes so late\nthrough night and wind?\n\n  It is\n"


@pytest.mark.parametrize("length", [1, 2, 5, 8])
@pytest.mark.parametrize("count", [0, 1, 5, 6, 17])
def test_windows_predict_every_token_once_from_as_much_as_fits(length: int, count: int) -> None:
    ids = tuple(range(100, 100 + count))
    for stride in range(1, length + 1):
        cut = list(windows(ids, length, stride))
        assert tuple(token for window in cut for token in window.tokens) == ids
        assert all(1 <= len(window.tokens) <= (stride if window.context else length) for window in cut)
        done = 0
        for window in cut:
            if done:  # what the model is given is as long as its context
                assert len(window.context) + len(window.tokens) - 1 == length
                assert window.context == ids[done - len(window.context) : done]
            else:
                assert window.context == ()
            done += len(window.tokens)


def test_the_windows_are_those_of_lm_evals_own_example() -> None:
    """Ten tokens and a context of four, as the docstring of its ``loglikelihood_rolling`` shows them."""
    cut = [(window.context, window.tokens) for window in windows(tuple(range(10)), 4, 4)]
    assert cut == [((), (0, 1, 2, 3)), ((3,), (4, 5, 6, 7)), ((5, 6, 7), (8, 9))]


@pytest.mark.parametrize("most", [3, 10, 30, 60, 1000])
def test_pieces_are_the_text_and_none_is_too_long(most: int) -> None:
    cut = list(pieces(TEXT, most))
    assert "".join(cut) == TEXT
    assert all(0 < len(piece) <= most for piece in cut)


def test_a_piece_ends_behind_a_line_where_it_can() -> None:
    assert next(pieces(TEXT, 70)).endswith("so late\n")
    assert list(pieces("one two three", 9)) == ["one two", " three"]
    assert list(pieces("", 9)) == [""]


def test_what_a_tokenizer_puts_around_texts_is_left_out() -> None:
    assert own_tokens((1, 7, 8, 2), (1, 2)) == (7, 8)
    assert own_tokens((1, 7, 1), (1,)) == (7, 1)
    assert own_tokens((7, 8), ()) == (7, 8)
    whole = TOKENIZER.encode(TEXT, add_special_tokens=True)
    assert own_tokens(whole, TOKENIZER.encode("", add_special_tokens=True)) == TOKENIZER.encode(
        TEXT, add_special_tokens=False
    )
