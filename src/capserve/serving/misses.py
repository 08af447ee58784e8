"""Why was not more of a prompt reused?

A reason is present whenever a reply had to read again what some earlier turn had read, or found
nothing at all (P7: no silent zero). It is absent when everything that was known was reused, and
when a resent prompt starts again at its own end: the generation prompt after it is a few tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from capserve.engine.seam import TokenArray
from capserve.serving.capsules.catalog import Loss
from capserve.serving.journal import JournalView
from capserve.text.prompt import Prompt

OWNER_SEPARATOR = "/"
"""A namespace is `owner/salt`: the owner is the caller's API key, under whatever name."""

OPENING_TOKENS = 3
"""What stands before a prompt's first word in ChatML, this model family's form: `<|im_start|>`, a
role, a line break. Two prompts that share no more than that share nothing of a message."""


class MissKind(StrEnum):
    NO_CANDIDATE = "no_candidate"
    """Nothing known shares more with this prompt than the control tokens that open any prompt, or
    no state was kept where it could be used."""
    DIVERGED = "diverged"
    """The most similar journal differs from the prompt at `message`, `token`."""
    NAMESPACE = "namespace"
    """The same caller has this history, under another cache key."""
    EVICTED = "evicted"
    OVER_BUDGET = "over_budget"
    NOT_ON_GRID = "not_on_grid"
    """A longer state fits, but exact mode may not start from it."""


@dataclass(frozen=True, slots=True)
class MissReason:
    kind: MissKind
    message: int | None = None
    """Index of the first message that differs; -1 when tools or template switches do: one digest
    covers both, so which of them it was is not known."""
    token: int | None = None

    def __str__(self) -> str:
        if self.kind is not MissKind.DIVERGED:
            return self.kind.value
        where = "tools_or_switches" if self.message == -1 else f"message {self.message}"
        return f"diverged({where}, token {self.token})"


@dataclass(frozen=True, slots=True)
class Known:
    """What a plan found out, as far as a miss needs it."""

    prompt: Prompt
    reused: int
    own: Sequence[JournalView]
    shared: Mapping[str, int]
    """Common prefix of the prompt and each journal of `own`, in tokens."""
    journals: Sequence[JournalView]
    namespace: str
    lost: tuple[int, Loss] | None
    """The longest remembered loss that starts the prompt: position and why."""
    off_grid: Sequence[int]
    """Positions of matching states that exact mode refused."""
    blocks: Sequence[bytes]
    """`block_digests` of the prompt."""


def explain(known: Known) -> MissReason | None:
    """The one most useful reason, or None when nothing known was read again."""
    reused = known.reused
    prompt = known.prompt
    # A reply that is continued lies behind `prompt_end`, and may be long.
    enough = len(prompt.tokens) if prompt.continues_reply else prompt.prompt_end
    if reused > 0 and reused >= enough:
        return None
    if any(position > reused for position in known.off_grid):
        return MissReason(MissKind.NOT_ON_GRID)
    if known.lost is not None and known.lost[0] > reused:
        return MissReason(MissKind(known.lost[1].value))
    best = max(known.own, key=lambda journal: known.shared[journal.session_id], default=None)
    common = 0 if best is None else known.shared[best.session_id]
    if reused < _common_elsewhere(known) and not _same_message(best, known.prompt):
        return MissReason(MissKind.NAMESPACE)
    # One token past the reused ones may be known too: the pending one, which no state absorbed.
    known_tokens = 0 if best is None or common < reused else len(best.tokens)
    if reused > 0 and known_tokens <= reused + 1:
        return None
    if best is None or common <= OPENING_TOKENS:
        return MissReason(MissKind.NO_CANDIDATE)
    if common < min(len(known.prompt.tokens), len(best.tokens)):
        return MissReason(MissKind.DIVERGED, _message_at(best, known.prompt, common), common)
    return MissReason(MissKind.NO_CANDIDATE)


def _common_elsewhere(known: Known) -> int:
    """Longest common prefix with a journal of the same owner's other namespaces.

    Only whole equal messages count: every rendered prompt shares its first control tokens. Other
    owners' journals are never looked at, or a miss reason would tell what they hold.
    """
    owner = owner_of(known.namespace)
    tokens: TokenArray = known.prompt.tokens
    return max(
        (
            journal.shares(tokens, known.blocks)
            for journal in known.journals
            if journal.namespace != known.namespace
            and owner_of(journal.namespace) == owner
            and _same_message(journal, known.prompt)
        ),
        default=0,
    )


def owner_of(namespace: str) -> str:
    return namespace.split(OWNER_SEPARATOR, 1)[0]


def _same_message(journal: JournalView | None, prompt: Prompt) -> bool:
    """Do both begin with the same first message (and the same tools)?"""
    return journal is not None and len(prompt.chain) > 1 and journal.chain[:2] == prompt.chain[:2]


def _message_at(journal: JournalView, prompt: Prompt, token: int) -> int:
    for index, (before, now) in enumerate(zip(journal.chain, prompt.chain, strict=False)):
        if before != now:
            return index - 1
    # The messages mean the same, yet their tokens differ (a template that drops old thinking):
    # the first message that no earlier mark covers.
    return max((mark.messages for mark in journal.marks if mark.position <= token), default=0)
