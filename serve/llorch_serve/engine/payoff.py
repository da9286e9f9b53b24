"""Whether guesses pay: what calls have cost lately, and what checks of guesses gave for it.

The engine measures its calls; the scheduler asks before it plans a check, or a call of a draft model. A check
is a call of its own, while a decode call serves all running sequences at once. So it pays where it gives more
tokens in a second than such a call does, whatever guessed them, and for any number of sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FREE_TRIALS: Final = 4
"""Checks that are made, and may lose, before anything is known of guesses. A draft model may read for them as
long as so many answers take.
"""
PROBE_SHARE: Final = 0.01
"""Part of the engine's time that may be lost to checks that do not pay, to see whether they do by now; and as
much to what a draft model reads for them.
"""
MEASURE_AGAIN: Final = 128
"""Checks after which sequences are decoded once, so that what that costs is known as of late."""
_ALLOWANCE: Final = 4  # decode calls whose time may be lost at once, so that short runs try at all
_FIRST_LENGTH: Final = 4
_LONGEST: Final = 64  # tokens of any guess
_KEPT: Final = 0.8  # of what is remembered, when a call has been measured
_KEPT_OF_ALL: Final = 0.95  # the same of what is remembered of all sequences together
_SHORTEST_PAUSE: Final = 16
_LONGEST_PAUSE: Final = 256
_LIKELIEST: Final = 0.99  # that a guess is taken to be right
_OUTLIER: Final = 2.0  # times what a call usually takes, beyond which it does not count
_SHORTEST_CALL: Final = 1e-9  # seconds, where a clock shows none
_LEAST_SPREAD: Final = 1e-6  # of points, relative to their squares, from which a slope is more than rounding


@dataclass(slots=True)
class DraftRecord:
    """How good guesses were lately.

    right, judged: guesses that were right, and all whose turn came, as that of those behind a wrong one does
        not.
    paused_until: tokens that a sequence must have before another check that is not thought to pay.
    """

    right: float = 0.0
    judged: float = 0.0
    paused_until: int = 0
    pause: int = _SHORTEST_PAUSE

    def add(self, *, drafted: int, accepted: int, kept: float) -> None:
        """Take note of a check. kept: the part of what was before that still counts."""
        self.right = kept * self.right + accepted
        self.judged = kept * self.judged + accepted + (accepted < drafted)


class Payoff:
    """What one engine has measured. Times are in seconds; not thread-safe."""

    def __init__(self) -> None:
        self._decode: dict[int, float] = {}
        self._checks = _Line()
        self._guess = _Mean()
        self._catch_up = _Mean()
        self._answer = _Mean()
        self._all = DraftRecord()
        self._trials = 0
        self._pays = False
        self._lost = self._read = 0.0
        self._since_decoded = 0

    def decoded(self, rows: int, seconds: float) -> None:
        """Take note of a call that gave each of ``rows`` sequences a token."""
        known = self._decode.get(rows, seconds)
        self._decode[rows] = _KEPT * known + (1 - _KEPT) * seconds
        self._spend(seconds)
        self._since_decoded = 0

    def guessed(self, tokens: int, seconds: float) -> None:
        """Take note of what a draft model's guesses cost; tokens: of all sequences together."""
        if tokens:  # else many that were not ready would outweigh what is remembered of guesses
            self._guess.add(seconds, tokens)
        self._spend(seconds)

    def caught_up(self, tokens: int, seconds: float) -> None:
        """Take note of what it cost to have a draft model read ``tokens`` that its sequences have already."""
        self._catch_up.add(seconds, tokens)
        self._spend(seconds)
        if not self._pays:
            self._read += seconds

    def checked(
        self,
        record: DraftRecord,
        *,
        drafted: int,
        accepted: int,
        seconds: float,
        running: int,
        generated: int,
    ) -> None:
        """Take note of a check. seconds: of its call. running: sequences that a decode call would have
        served. generated: tokens of this one, before the check.
        """
        self._checks.add(drafted + 1, seconds)
        record.add(drafted=drafted, accepted=accepted, kept=_KEPT)
        self._all.add(drafted=drafted, accepted=accepted, kept=_KEPT_OF_ALL)
        self._spend(seconds)
        self._trials += 1
        self._since_decoded += 1
        plain = self.plain(running)
        if self._trials <= FREE_TRIALS:
            self._read = 0.0
            return
        if plain is None:
            return
        base, slope = self._checks.fit()
        # What the system did meanwhile is no fault of guesses.
        usual = _OUTLIER * (base + slope * (drafted + 1))
        cost = min(seconds, usual) + self._guess.value * drafted
        self._lost = max(self._lost + cost - (accepted + 1) * plain, 0.0)
        self._pays = self._best(DraftRecord(), _LONGEST)[1] * plain >= 1  # where nothing is known of it
        if self._best(record, _LONGEST)[1] * plain >= 1:
            record.pause = _SHORTEST_PAUSE
        else:
            record.paused_until = generated + record.pause
            record.pause = min(2 * record.pause, _LONGEST_PAUSE)

    def _spend(self, seconds: float) -> None:
        """Count time, of which a share may have been lost."""
        self._lost = max(self._lost - PROBE_SHARE * seconds, 0.0)
        self._read = max(self._read - PROBE_SHARE * seconds, 0.0)

    def ended(self, generated: int) -> None:
        """Take note of the length of an answer."""
        self._answer.add(generated, 1)

    def plain(self, running: int) -> float | None:
        """Return the seconds that a token takes where ``running`` sequences get one in a call; None: not
        known.
        """
        seconds = self._decode.get(running)
        return None if seconds is None else seconds / running

    def worth(
        self, record: DraftRecord, *, most: int, running: int, generated: int, left: int, behind: int = 0
    ) -> bool:
        """Tell whether guesses of up to ``most`` tokens should be made and checked now, instead of decoding
        the sequence beside the others.

        running: sequences that decode. generated, left: tokens that this one has, and may still get. behind:
            tokens that a draft model has not read.
        After the first trials, False where a decode call of as many has not been measured of late, so that
        it is.
        """
        # How long an answer will be is not known; others' are the best guess, at any point of it.
        expected = min(left, self._answer.value or left)
        reading = behind * self._catch_up.value
        plain = self.plain(running)
        # What takes longer to read than all the rest to decode could not be made up for by any guess.
        hopeless = plain is not None and reading > expected * plain
        if self._trials < FREE_TRIALS:
            spent = plain is not None and reading > plain and self._read > FREE_TRIALS * expected * plain
            return not (hopeless or spent)
        if plain is None or self._since_decoded >= MEASURE_AGAIN:
            return False
        allowance = _ALLOWANCE * plain * running
        if self._lost > allowance:
            return False
        saved = plain - 1 / self._best(record, most)[1]
        if saved < 0:
            affordable = reading <= plain or self._read <= allowance
            return generated >= record.paused_until and affordable and not hopeless
        return reading <= expected * saved

    def length(self, record: DraftRecord, most: int) -> int:
        """Return how many tokens to guess, at most ``most``: those that give most tokens in a second."""
        return self._best(record, most)[0] if self._trials else min(_FIRST_LENGTH, most)

    def _best(self, record: DraftRecord, most: int) -> tuple[int, float]:
        """Return how many tokens are best guessed and checked at a time, and how many are thought to come of
        that in a second.

        Of k guesses that are each right with probability a, (1 - a**(k + 1)) / (1 - a) tokens come of a check
        (Leviathan et al. 2023, equation 1). What all sequences had counts as one guess of each, so that a new
        one is not judged by nothing.
        """
        likely = min((record.right + self._all.right / self._all.judged) / (record.judged + 1), _LIKELIEST)
        base, slope = self._checks.fit()
        each = self._guess.value + slope
        best, fastest, tokens = 1, 0.0, 1.0
        for count in range(1, most + 1):
            tokens += likely**count
            speed = tokens / max(base + slope + count * each, _SHORTEST_CALL)
            if speed < fastest:  # each further guess gives less than the one before it, and costs as much
                break
            best, fastest = count, speed
        return best, fastest


class _Mean:
    """A mean of what was measured lately, for each unit of it; 0 as long as nothing was."""

    def __init__(self) -> None:
        self._sum = self._units = 0.0

    def add(self, amount: float, units: int) -> None:
        self._sum = _KEPT * self._sum + amount
        self._units = _KEPT * self._units + units

    @property
    def value(self) -> float:
        return self._sum / self._units if self._units else 0.0


class _Line:
    """A line through points that fade, by least squares: seconds of a call by its rows."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        self._n = _KEPT_OF_ALL * self._n + 1
        self._x = _KEPT_OF_ALL * self._x + x
        self._y = _KEPT_OF_ALL * self._y + y
        self._xx = _KEPT_OF_ALL * self._xx + x * x
        self._xy = _KEPT_OF_ALL * self._xy + x * y

    def fit(self) -> tuple[float, float]:
        """Return the value at 0 and the slope, neither of them below 0; twice 0 for no points."""
        if not self._n:
            return 0.0, 0.0
        spread = self._xx - self._x * self._x / self._n
        known = spread > _LEAST_SPREAD * self._xx
        slope = max((self._xy - self._x * self._y / self._n) / spread, 0.0) if known else 0.0
        return max((self._y - slope * self._x) / self._n, 0.0), slope
