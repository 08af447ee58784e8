"""A byte of the manifest that turned on the disk is never taken for what was written."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
from disk_harness import FINGERPRINT, ROOMY, FakePart, key, save

from capserve.serving.capsules.rows import SessionRow, TurnRow
from capserve.serving.disk.manifest import FILE_NAME
from capserve.serving.disk.tier import DiskTier
from capserve.text.messages import Message
from capserve.text.prompt import TurnRecord

FLIPS = 150


def test_a_row_that_comes_back_is_the_row_that_was_written(tmp_path: Path) -> None:
    rng = random.Random(1)
    tokens = np.arange(100, 1100, dtype=np.int32)
    record = TurnRecord((Message("user", "words " * 200),), "text " * 300, tokens, (), None)
    tier = DiskTier.open(tmp_path / "whole", FINGERPRINT, ROOMY)
    save(tier, "a", [FakePart("a")])
    tier.put_turn(TurnRow("k/a", b"d" * 16, None, record, 1.0))
    tier.put_session(
        SessionRow(
            "s", "k/a", None, tokens.tobytes(), (), (), (), (b"c" * 16,), key("a"), "{}", 1.0
        )
    )
    tier.close(10)

    def read(directory: Path) -> list[str]:
        opened = DiskTier.open(directory, FINGERPRINT, ROOMY)
        try:
            turns = [(row, row.record.tokens.tobytes()) for row in opened.turns()]
            return [
                *(f"{row.key} {row.spans} {row.parts}" for row in opened.capsules()),
                *(f"{row}" for row in opened.sessions()),
                *(
                    f"{row.digest!r} {row.record.text} {row.record.messages} {raw!r}"
                    for row, raw in turns
                ),
            ]
        finally:
            opened.close(10)

    written = set(read(tmp_path / "whole"))
    assert len(written) == 3
    wrong = []
    for flip in range(FLIPS):
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "whole", copy)
        file = copy / FILE_NAME
        content = bytearray(file.read_bytes())
        place = rng.randrange(len(content))
        content[place] ^= 0x01
        file.write_bytes(content)
        if not set(read(copy)) <= written:
            wrong.append((flip, place))
        shutil.rmtree(copy)
    assert not wrong, f"{len(wrong)} of {FLIPS} flips changed a row that was taken up: {wrong[:5]}"
