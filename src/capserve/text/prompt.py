"""How does a conversation become prompt tokens, and what of it do we already know?

The template renders the whole conversation; what a journal already holds is spliced in as the
journal's own tokens, so that only the new suffix is tokenized and nothing generated is re-spelled.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from capserve.errors import ContextLengthError, InvalidRequestError
from capserve.text.equivalence import digests, normalise
from capserve.text.markup import EMPTY_THINK, THINK_CLOSE, THINK_OPEN
from capserve.text.messages import Conversation, Message
from capserve.text.splice import Agreement, agree, common_prefix
from capserve.text.template import EFFORTS, ChatTemplate
from capserve.text.tokenizer import Encoding, Tokenizer

TokenArray = npt.NDArray[np.int32]
T = TypeVar("T")

MOST_BREAKPOINTS = 4
"""The last ones are taken, as the API that `cache_control` comes from has it: each may cost one
more rendering of the conversation."""

MEMO_ENTRIES = 64
"""Different system prompts whose ends are remembered; each holds its text once more."""


@dataclass(frozen=True)
class TurnRecord:
    """A finished turn as the journal has it: the basis of message-level continuation.

    `tokens` are the journal's own ids for `messages` (prompt, reply, and the end token that closed
    it); `text` is the template's rendering of the same messages, without a generation prompt.
    """

    messages: tuple[Message, ...]
    """Prompt messages as they were sent, then the generated one with its true reasoning."""
    text: str
    tokens: TokenArray
    tools: tuple[Mapping[str, Any], ...] = ()
    """As the conversation that these messages are had them; so are the switches."""
    template_kwargs: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt and the positions in it that are worth coming back to."""

    tokens: TokenArray
    conversation: Conversation
    """With equivalent messages replaced by the record's own, where a record was used."""
    chain: tuple[bytes, ...]
    """chain[i]: digest of tools, template switches and the first i messages (len = messages + 1).
    Messages that mean the same have the same digest."""
    system_end: int
    """Tokens of system + tools, or 0 when there are none."""
    prompt_end: int
    """Tokens before the generation prompt, or before the reply that is continued."""
    spliced_tokens: int = 0
    """Leading tokens taken from a journal instead of being tokenized again."""
    spliced_messages: int = 0
    """Messages that those tokens are; 0 when the template changed one, and only the tokens before
    its turn were taken."""
    starts_in_reasoning: bool = False
    """The generation prompt ends inside an open think block."""
    continues_reply: bool = False
    """The last message is the assistant's own and is continued: no generation prompt."""
    breakpoints: tuple[int, ...] = ()
    """Ends, in tokens, of the messages that the client marked as worth coming back to."""
    notes: tuple[str, ...] = ()
    """What was taken out of the request before rendering, in words."""


@dataclass(frozen=True, slots=True)
class TurnMarks:
    """What the template puts around an assistant's text."""

    header: str
    """`<|im_start|>assistant\\n`: everything before the reply, think block apart."""
    start: str
    """The added token that opens a turn."""
    end: str
    """The added token that closes one."""


class _Memo(Generic[T]):
    """The values of the last MEMO_ENTRIES keys. Two threads may compute the same value."""

    def __init__(self) -> None:
        self._values: OrderedDict[bytes, T] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes, compute: Callable[[], T]) -> T:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = compute()
        with self._lock:
            self._values[key] = value
            while len(self._values) > MEMO_ENTRIES:
                self._values.popitem(last=False)
        return value


class PromptBuilder:
    """Renders, tokenizes and splices. Stateless but for memos; safe in any thread."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self.marks = self._probe_marks()
        """None for a template that frames no turns: it is served, but never spliced."""
        self._systems: _Memo[tuple[str, TokenArray]] = _Memo()
        self._endings: _Memo[str] = _Memo()

    def switches(self, wanted: Mapping[str, Any], effort: str | None) -> dict[str, Any]:
        """Template switches: those `wanted`, and the effort where the template has such a word.

        An effort that it does not know becomes the nearest that it does, the higher of two.
        """
        known = self._template.efforts
        if effort not in EFFORTS or not known or "reasoning_effort" in wanted:
            return dict(wanted)
        rank = EFFORTS.index(effort)
        best = min(known, key=lambda word: (abs(EFFORTS.index(word) - rank), -EFFORTS.index(word)))
        return {**wanted, "reasoning_effort": best}

    def knows(self, switch: str) -> bool:
        """The template asks for a switch of that name."""
        return switch in self._template.switches

    def chain(self, conversation: Conversation) -> tuple[bytes, ...]:
        """`Prompt.chain` of this conversation, without rendering it."""
        return digests(normalise(conversation)[0], self._template.stripped)

    def build(
        self,
        conversation: Conversation,
        record: TurnRecord | None = None,
        chain: tuple[bytes, ...] | None = None,
        most_tokens: int | None = None,
    ) -> Prompt:
        """The prompt of a request.

        `record`: a finished turn whose messages mean the same as the first ones here; the caller
        found it by an equal digest in `chain(conversation)`, and may pass that chain on to spare
        its second computation. Reasoning that the client left out is taken from the record; where
        it sent another than the record has, its own is what it means, and the record is not used;
        nor is one that is longer than the conversation.
        `most_tokens`: a prompt that is far longer need not be tokenized to its end.

        Raises InvalidRequestError when the template refuses the messages, and ContextLengthError
        for a prompt that was given up.
        """
        if not conversation.messages:
            raise InvalidRequestError("messages: at least 1 is needed, got 0", param="messages")
        conversation, notes = normalise(conversation)
        if chain is None:
            chain = digests(conversation, self._template.stripped)
        assert len(chain) == len(conversation.messages) + 1, "a chain of another conversation"
        if record is not None and (
            len(record.messages) > len(conversation.messages)
            or _has_edited_reasoning(conversation, record)
        ):
            record = None
        if record is not None:
            conversation = _with_true_replies(conversation, record)
        continues = conversation.messages[-1].role == "assistant"
        text, boundary_char = self._render(conversation, continues, chain[0])

        head, glue, start = self._splice(record, text) if record else (_NO_TOKENS, "", 0)
        new = glue + text[start:]
        if most_tokens is not None:
            self._refuse_hopeless(new, len(head), most_tokens)
        tail = self._tokenizer.encode_with_borders(new)
        tokens = np.concatenate((head, tail.tokens))
        whole = record is not None and len(head) == len(record.tokens)
        known = len(record.messages) if record is not None and whole else 0

        def offset(char: int) -> int:
            return len(head) + _offset(tail, char - start + len(glue))

        return Prompt(
            tokens=tokens,
            conversation=conversation,
            chain=chain,
            system_end=self._system_end(conversation, chain, text, tokens),
            # A boundary inside the spliced head has no border to be found at; its end is the next
            # best.
            prompt_end=offset(boundary_char),
            spliced_tokens=len(head),
            spliced_messages=known,
            starts_in_reasoning=self._starts_in_reasoning(text),
            continues_reply=continues,
            breakpoints=tuple(
                offset(char) for char in self._marked_ends(conversation, text, known, start)
            ),
            notes=notes,
        )

    def _marked_ends(
        self, conversation: Conversation, text: str, known: int, start: int
    ) -> list[int]:
        """Characters of `text` at which the last marked messages end, ascending.

        Only behind the `known` messages and the `start` characters that a journal already holds:
        its own boundaries were taken when it was made. A message whose rendering changes with what
        follows it (a template that drops old thinking) has no end to come back to.
        """
        messages = conversation.messages
        marked = [i for i, message in enumerate(messages) if message.breakpoint and i >= known]
        ends: list[int] = []
        for i in marked[-MOST_BREAKPOINTS:]:
            try:
                bare = self._template.render(
                    replace(conversation, messages=messages[: i + 1]), add_generation_prompt=False
                )
            except InvalidRequestError:  # a system message alone is no conversation to some
                continue
            if len(bare) > start and text.startswith(bare):
                ends.append(len(bare))
        return ends

    def _refuse_hopeless(self, new: str, known_tokens: int, most_tokens: int) -> None:
        if self._tokenizer.surely_exceeds(new, max(0, most_tokens - known_tokens)):
            raise ContextLengthError(
                f"The maximum context length is {most_tokens} tokens; the prompt has more: "
                f"{len(new)} characters beside {known_tokens} tokens that are known.",
                param="messages",
            )

    def make_record(self, prompt: Prompt, reply: Message, tokens: TokenArray) -> TurnRecord | None:
        """The record of a turn that answered `prompt` with `reply`; `tokens` is the whole journal.

        None when it is no basis for another turn: the tokens do not end with the token that closes
        a turn (cut off, stopped), or the reply continued an earlier message.
        """
        if self.marks is None or prompt.continues_reply or not len(tokens):
            return None
        if int(tokens[-1]) != self._tokenizer.specials[self.marks.end]:
            return None
        messages = (*prompt.conversation.messages, reply)
        conversation = replace(prompt.conversation, messages=messages)
        try:
            text = self._template.render(conversation, add_generation_prompt=False)
        except InvalidRequestError:
            return None
        return TurnRecord(messages, text, tokens, conversation.tools, conversation.template_kwargs)

    def _render(self, conversation: Conversation, continues: bool, head: bytes) -> tuple[str, int]:
        """The prompt's text, and the character at which its generation prompt begins."""
        render = self._template.render
        if not continues:
            text = render(conversation, add_generation_prompt=True)
            ending = self._generation_prompt(conversation, head)
            if ending and text.endswith(ending):
                return text, len(text) - len(ending)
            bare = render(conversation, add_generation_prompt=False)
            return text, common_prefix(text, 0, bare, 0)
        text = render(conversation, add_generation_prompt=False)
        if self.marks is not None and (end := text.rfind(self.marks.end)) >= 0:
            text = text[:end]
        before = replace(conversation, messages=conversation.messages[:-1])
        try:
            bare = render(before, add_generation_prompt=False)
        except InvalidRequestError:  # nothing is left that a template could begin with
            return text, 0
        return text, common_prefix(text, 0, bare, 0)

    def _generation_prompt(self, conversation: Conversation, head: bytes) -> str:
        """What the template adds to ask for a reply, with these tools and switches (`head` is their
        digest), or "" when it doesn't simply add. Spares a long conversation a second rendering."""

        def find() -> str:
            probe = replace(conversation, messages=(Message("user", "q"),))
            with_prompt = self._template.render(probe, add_generation_prompt=True)
            without = self._template.render(probe, add_generation_prompt=False)
            return with_prompt[len(without) :] if with_prompt.startswith(without) else ""

        return self._endings.get(head, find)

    def _splice(self, record: TurnRecord, text: str) -> tuple[TokenArray, str, int]:
        """(journal tokens to begin with, text before the rest, where in `text` the rest begins)."""
        marks = self.marks
        if marks is None:
            return _NO_TOKENS, "", 0
        if text.startswith(record.text):
            common = Agreement(len(record.text), len(record.text), complete=True)
        else:
            common = agree(record.text, text, marks.header)
        if common.complete:
            # The journal ends with the end token itself; what the template writes after it is new.
            _, _, glue = record.text.rpartition(marks.end)
            return record.tokens, glue, common.fresh_chars
        return self._splice_turns_before(record, text, common.known_chars, marks.start)

    def _splice_turns_before(
        self, record: TurnRecord, text: str, known_chars: int, start: str
    ) -> tuple[TokenArray, str, int]:
        """The journal up to the turn that the template changed (usually it dropped old thinking).

        Texts and journal are matched by counting turn openings: the journal may hold think blocks
        that neither text shows, so characters can't be mapped.
        """
        opening = np.flatnonzero(record.tokens == self._tokenizer.specials[start])
        turn = record.text.count(start, 0, known_chars) - 1
        if turn < 1 or record.text.count(start) != len(opening):
            return _NO_TOKENS, "", 0
        char = -1
        for _ in range(turn + 1):
            char = text.find(start, char + 1)
        return record.tokens[: opening[turn]], "", char

    def _system_end(
        self, conversation: Conversation, chain: tuple[bytes, ...], text: str, tokens: TokenArray
    ) -> int:
        leading = 0
        while (
            leading < len(conversation.messages) and conversation.messages[leading].role == "system"
        ):
            leading += 1
        if not leading and not conversation.tools:
            return 0
        head_text, head = self._systems.get(
            chain[leading], lambda: self._find_system(conversation, leading)
        )
        # A journal's tokens are kept as they are, so the end is only told where both agree.
        same = text.startswith(head_text) and np.array_equal(tokens[: len(head)], head)
        return len(head) if same else 0

    def _find_system(self, conversation: Conversation, leading: int) -> tuple[str, TokenArray]:
        """Text and tokens before the first turn, whatever the template: what two conversations that
        differ from their first word on have in common, cut where an added token begins."""
        texts = [
            self._template.render(
                replace(
                    conversation,
                    messages=(*conversation.messages[:leading], Message("user", word)),
                ),
                add_generation_prompt=False,
            )
            for word in ("a", "b")
        ]
        shared = texts[0][: common_prefix(texts[0], 0, texts[1], 0)]
        encoding = self._tokenizer.encode_with_borders(texts[0])
        char = encoding.floor_start(len(shared))
        return shared[:char], encoding.tokens[: encoding.token_offset(char)]

    def _starts_in_reasoning(self, text: str) -> bool:
        if self.marks is None:
            return text.rstrip().endswith(THINK_OPEN)
        _, _, body = text.rpartition(self.marks.header)
        body = body.removeprefix(EMPTY_THINK).lstrip()
        return body.startswith(THINK_OPEN) and THINK_CLOSE not in body

    def _probe_marks(self) -> TurnMarks | None:
        asked = Message("user", "q")
        reply = Message("assistant", "reply", reasoning="")
        try:
            before, after = (
                self._template.render(Conversation(messages), add_generation_prompt=False)
                for messages in ((asked,), (asked, reply))
            )
        except InvalidRequestError:
            return None
        head, found, rest = after.removeprefix(before).rpartition(reply.content)
        header = head.removesuffix(EMPTY_THINK)
        start, end = self._first_special(header), self._first_special(rest)
        if not found or not after.startswith(before) or start is None or end is None:
            return None
        return TurnMarks(header, start, end) if header.startswith(start) else None

    def _first_special(self, text: str) -> str | None:
        encoding = self._tokenizer.encode_with_borders(text)
        if not len(encoding.starts):
            return None
        start = int(encoding.starts[0])
        end = int(encoding.chars[np.searchsorted(encoding.chars, start, side="right")])
        return text[start:end]


_NO_TOKENS: TokenArray = np.empty(0, dtype=np.int32)
_NO_TOKENS.flags.writeable = False


def _offset(encoding: Encoding, char: int) -> int:
    return encoding.token_offset(encoding.floor(max(char, 0)))


def _has_edited_reasoning(conversation: Conversation, record: TurnRecord) -> bool:
    """Some assistant message came with reasoning, and not with the record's."""
    return any(
        theirs.role == "assistant"
        and (sent := (theirs.reasoning or "").strip()) != ""
        and sent != (mine.reasoning or "").strip()
        for mine, theirs in zip(record.messages, conversation.messages, strict=False)
    )


def _with_true_replies(conversation: Conversation, record: TurnRecord) -> Conversation:
    """The journal's assistant messages in place of the echoed ones: they know their reasoning."""
    known = len(record.messages)
    merged = tuple(
        mine if mine.role == "assistant" else theirs
        for mine, theirs in zip(record.messages, conversation.messages[:known], strict=True)
    )
    return replace(conversation, messages=merged + conversation.messages[known:])
