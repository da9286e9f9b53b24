"""A prompt that several answers share: the first of them computes it, and the others start from what it left.

The intake makes one for a request of several answers and gives it to their sequences; the runner keeps the
logits here, and the scheduler lets an answer start from them where a slot still holds the prompt's keys and
values.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(slots=True, eq=False)
class SharedPrompt:
    """What the first answer leaves to the others.

    logits: float32 [vocabulary], after the prompt's last token; None until that has been computed.
    """

    logits: npt.NDArray[np.float32] | None = None

    @property
    def computed(self) -> bool:
        """Whether the prompt has been computed."""
        return self.logits is not None
