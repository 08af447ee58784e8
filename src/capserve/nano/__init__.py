"""Where is the embedded model?

A trained checkpoint of 11.5 million parameters in the hybrid architecture that this server is for,
so that a demo, a test or a first try runs real turns on any CPU. README.md beside this file is its
card; `recipes/nano` in the repository shows how such a model is made.
"""

from __future__ import annotations

from pathlib import Path

NAME = "nano"


def checkpoint_dir() -> Path:
    """The directory with config, tokenizer, chat template and weights, in Hugging Face layout."""
    return Path(__file__).parent
