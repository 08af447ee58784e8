"""Where do the kernels of a captured step read where they are, and leave what came of it?

Eight int32 words on the device. Kernels of the step take one of them as a tensor of one element
(`start`, `accepted`), so one graph serves every position. The host writes them where a turn begins
or the state moves, and otherwise only the step itself does.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

POSITION: Final = 0
COUNT: Final = 1
ACCEPTED: Final = 2
STOP: Final = 3
WORDS: Final = 8


class Cursor:
    """`words` int32 [8]; every property is a view [1] of it."""

    def __init__(self, device: torch.device) -> None:
        self.words: Tensor = torch.zeros(WORDS, dtype=torch.int32, device=device)
        self.words[STOP] = -1

    @property
    def position(self) -> Tensor:
        """Tokens that the state has absorbed: where row 0 of the next verify stands."""
        return self.words[POSITION : POSITION + 1]

    @property
    def count(self) -> Tensor:
        """Entries of `decided`: after a verify, as many of its rows are part of the state; after
        steps without drafts, the tokens since the last MTP slot that is built."""
        return self.words[COUNT : COUNT + 1]

    @property
    def accepted(self) -> Tensor:
        """Rows of the last verify that the next step folds into the state."""
        return self.words[ACCEPTED : ACCEPTED + 1]

    @property
    def stop(self) -> Tensor:
        """The end token that closed the last chunk, or -1."""
        return self.words[STOP : STOP + 1]

    def put(self, *, position: int, count: int = 0, accepted: int = 0) -> None:
        """The host's word, between two steps."""
        values = [position, count, accepted, -1]
        self.words[: len(values)].copy_(torch.tensor(values, dtype=torch.int32))
