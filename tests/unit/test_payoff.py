"""Whether guesses pay: decided by what calls took, and bounded in what it may cost to find out."""

from __future__ import annotations

import random

import pytest

from llorch_serve.engine.payoff import FREE_TRIALS, MEASURE_AGAIN, PROBE_SHARE, DraftRecord, Payoff

LEFT = 1000


class Play:
    """One sequence after the other on a model whose calls take known times.

    likely: that a guess is right. guess: seconds of a draft model for a token. check: of a check, for each of
    its rows, beyond the second that every call takes.
    """

    def __init__(self, *, likely: float, guess: float, check: float, seed: int = 0) -> None:
        self.payoff = Payoff()
        self.likely, self.guess, self.check = likely, guess, check
        self.chance = random.Random(seed)
        self.now = 0.0
        self.tokens = self.drafted = self.accepted = 0

    def answer(self, tokens: int, *, behind: int = 0, read: float = 0.0) -> None:
        record, generated = DraftRecord(), 0
        while generated < tokens:
            left = tokens - generated
            if left > 1 and self.payoff.worth(
                record, most=16, running=1, generated=generated, left=left, behind=behind
            ):
                if behind:
                    self.payoff.caught_up(behind, behind * read)
                    self.now += behind * read
                    behind = 0
                generated += self._check(record, left, generated)
            else:
                self.payoff.decoded(1, 1.0)
                self.now += 1.0
                generated += 1
        self.payoff.ended(generated)
        self.tokens += generated

    def _check(self, record: DraftRecord, left: int, generated: int) -> int:
        count = self.payoff.length(record, min(16, left - 1))
        right = [self.chance.random() < self.likely for _ in range(count)]
        accepted = (*right, False).index(False)
        self.payoff.guessed(count, count * self.guess)
        seconds = 1.0 + self.check * count
        self.payoff.checked(
            record, drafted=count, accepted=accepted, seconds=seconds, running=1, generated=generated
        )
        self.now += count * self.guess + seconds
        self.drafted += count
        self.accepted += accepted
        return accepted + 1


def test_guesses_that_are_right_pay() -> None:
    play = Play(likely=0.9, guess=0.1, check=0.1)
    for _ in range(20):
        play.answer(200)
    assert play.now < 0.6 * play.tokens


@pytest.mark.parametrize("likely", [0.0, 0.3, 0.5])
@pytest.mark.parametrize("length", [30, 400])
def test_guesses_that_do_not_pay_cost_little(likely: float, length: int) -> None:
    play = Play(likely=likely, guess=0.7, check=0.2)
    for _ in range(4000 // length):
        play.answer(length)
    assert play.now < 1.03 * play.tokens
    assert play.drafted > 0


def test_whoever_asks_again_finds_out_that_they_pay_by_now() -> None:
    play = Play(likely=0.0, guess=0.3, check=0.1)
    for _ in range(10):
        play.answer(200)
    play.likely = 0.95
    before = play.now
    for _ in range(10):
        play.answer(200)
    assert play.now - before < 0.7 * 2000


def test_the_length_follows_what_guesses_give_and_cost() -> None:
    def length(likely: float, guess: float) -> int:
        play = Play(likely=likely, guess=guess, check=0.05)
        play.answer(300)
        return play.payoff.length(DraftRecord(right=100 * likely, judged=100), 16)

    assert length(0.95, 0.05) > 6
    assert length(0.95, 0.05) > length(0.7, 0.05)
    assert length(0.95, 0.05) > length(0.95, 0.5)
    assert length(0.2, 0.3) == 1


def test_after_the_first_trials_nothing_is_checked_unless_a_decode_call_was_measured_of_late() -> None:
    payoff, record = Payoff(), DraftRecord()
    asked = {"most": 16, "running": 2, "generated": 5, "left": LEFT}
    for _ in range(FREE_TRIALS):
        assert payoff.worth(record, **asked)
        payoff.checked(record, drafted=4, accepted=4, seconds=1.0, running=2, generated=0)
    assert not payoff.worth(record, **asked)
    payoff.decoded(1, 1.0)
    assert not payoff.worth(record, **asked)
    payoff.decoded(2, 1.0)
    assert payoff.plain(2) == 0.5
    for _ in range(MEASURE_AGAIN):
        assert payoff.worth(record, **asked)
        payoff.checked(record, drafted=4, accepted=4, seconds=1.0, running=2, generated=0)
    assert not payoff.worth(record, **asked)
    payoff.decoded(2, 1.0)
    assert payoff.worth(record, **asked)


def test_a_check_is_measured_against_a_batch_of_all_that_run() -> None:
    payoff, record = Payoff(), DraftRecord()
    payoff.decoded(1, 1.0)
    payoff.decoded(8, 2.0)
    for _ in range(FREE_TRIALS + 4):  # three tokens a second
        payoff.checked(record, drafted=4, accepted=2, seconds=1.0, running=1, generated=0)
    payoff.decoded(1, 1.0)
    assert payoff.worth(record, most=16, running=1, generated=20, left=LEFT)
    record.paused_until = LEFT
    assert not payoff.worth(record, most=16, running=8, generated=20, left=LEFT)


def test_what_loses_is_bounded_by_a_share_of_the_time() -> None:
    payoff, record = Payoff(), DraftRecord()
    payoff.decoded(1, 1.0)
    spent, lost, tried = 1.0, 0.0, 0
    for count in range(3000):
        if payoff.worth(record, most=16, running=1, generated=count, left=LEFT):
            payoff.checked(record, drafted=4, accepted=0, seconds=3.0, running=1, generated=count)
            spent += 3.0
            tried += 1
            lost += 2.0 if tried > FREE_TRIALS else 0.0
        else:
            payoff.decoded(1, 1.0)
            spent += 1.0
        assert lost <= PROBE_SHARE * spent + 4 + 2
    assert tried > FREE_TRIALS + 5
    assert lost < 1.3 * PROBE_SHARE * spent


@pytest.mark.parametrize(("answers", "worth"), [(200, True), (4, False)])
def test_a_long_prompt_is_read_for_long_answers_alone(answers: int, worth: bool) -> None:
    play = Play(likely=0.9, guess=0.1, check=0.1)
    play.answer(300)
    for _ in range(12):
        play.payoff.ended(answers)
    play.payoff.caught_up(1000, 100.0)  # a tenth of a decode step for each token
    play.payoff.decoded(1, 1.0)
    asked = play.payoff.worth(DraftRecord(), most=16, running=1, generated=1, left=LEFT, behind=500)
    assert asked is worth
    assert play.payoff.worth(DraftRecord(), most=16, running=1, generated=1, left=LEFT, behind=5)


def test_prompts_that_cost_more_than_guesses_give_lose_little() -> None:
    play = Play(likely=0.9, guess=0.1, check=0.1)
    for _ in range(200):
        play.answer(20, behind=1000, read=0.05)
    assert play.now < 1.05 * play.tokens


@pytest.mark.parametrize("likely", [0.0, 0.3])
@pytest.mark.parametrize(("length", "behind", "read"), [(10, 8000, 0.005), (100, 2000, 0.005)])
def test_prompts_that_are_read_for_guesses_that_do_not_pay_cost_little(
    likely: float, length: int, behind: int, read: float
) -> None:
    play = Play(likely=likely, guess=0.7, check=0.2)
    for _ in range(4000 // length):
        play.answer(length, behind=behind, read=read)
    assert play.now < 1.03 * play.tokens
    assert play.drafted > 0


def test_a_draft_that_could_not_guess_yet_is_not_taken_for_a_slow_one() -> None:
    payoff, record = Payoff(), DraftRecord(right=90, judged=100)
    payoff.decoded(1, 1.0)
    for _ in range(FREE_TRIALS + 1):
        payoff.guessed(4, 0.04)
        payoff.checked(record, drafted=4, accepted=4, seconds=1.0, running=1, generated=0)
    length = payoff.length(record, 16)
    for _ in range(100):  # parts of a long prompt
        payoff.guessed(0, 1e-5)
    assert payoff.length(record, 16) == length > 4


def test_what_was_read_for_others_in_vain_holds_up_nobody_whose_guesses_are_right() -> None:
    play = Play(likely=0.0, guess=0.5, check=0.1)
    play.answer(1000)
    play.payoff.caught_up(1000, 50.0)
    play.payoff.decoded(1, 1.0)
    right = DraftRecord(right=50, judged=50)
    asked = {"most": 16, "running": 1, "generated": 1, "left": LEFT}
    assert play.payoff.worth(right, **asked, behind=1)
    assert not play.payoff.worth(DraftRecord(), **asked, behind=1000)


def test_answers_that_end_before_a_draft_has_read_their_prompts_are_left_alone() -> None:
    payoff, now, tokens = Payoff(), 0.0, 0
    for _ in range(300):
        behind = 2600
        for generated in range(1, 6):
            if payoff.worth(
                DraftRecord(), most=1, running=1, generated=generated, left=6 - generated, behind=behind
            ):
                assert behind > 512
                payoff.caught_up(512, 0.97)
                now, behind = now + 0.97, behind - 512
            payoff.decoded(1, 1.0)
            now, tokens = now + 1.0, tokens + 1
        payoff.ended(6)
    assert now < 1.05 * tokens
