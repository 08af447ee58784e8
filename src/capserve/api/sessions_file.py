"""How does a session's file come in without taking the memory or the event loop?

The body goes to a temporary file while it comes, counted against a limit of its own, and is read
from there as a map: checked whole, in a pool thread, before any of it is believed. One at a time,
since each may be as large as the memory for capsules.
"""

from __future__ import annotations

import asyncio
import mmap
import tempfile
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import IO, Any

from starlette.requests import Request

from capserve.api.body import STALL_TIMEOUT_S, RequestTimeoutError
from capserve.api.errors import UnsupportedMediaError
from capserve.api.schemas import MAX_MESSAGES, ChatRequest
from capserve.api.state import ServerState
from capserve.api.strict_json import MAX_DEPTH, too_deep
from capserve.api.validation import validated
from capserve.errors import CapsuleError, InvalidRequestError, QueueFullError, TooLargeError
from capserve.serving.misses import owner_of
from capserve.serving.sessions import intake
from capserve.serving.sessions.bundle import PIECE_BYTES, read
from capserve.serving.sessions.desk import record_at
from capserve.serving.sessions.orders import Imported, ImportSession, SessionOrder
from capserve.text.equivalence import nests_deeper
from capserve.text.messages import Conversation, Message
from capserve.text.prompt import PromptBuilder

TAR_TYPE = "application/x-tar"

FILE_TIMEOUT_S = 3600.0
"""Longest time for a whole file, against one that trickles: 2 GiB then need 5 Mbit/s."""


class FileImports:
    """Used from the event loop only."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._busy = False

    @asynccontextmanager
    async def read(
        self, request: Request, namespace: str
    ) -> AsyncIterator[Generator[SessionOrder, Any, Imported]]:
        """The orders for the file in the body (`intake.steps`); its bytes are there until the block
        ends.

        Raises CapsuleError or InvalidRequestError (400) for what is no session of this engine,
        TooLargeError (413), UnsupportedMediaError (415), QueueFullError (429) while another one
        comes in, and RequestTimeoutError (408).
        """
        self._refuse(request)
        self._busy = True
        try:
            with tempfile.TemporaryFile() as file:
                await self._receive(request, file)
                yield await asyncio.to_thread(self._orders, file, namespace)
        finally:
            self._busy = False

    def _refuse(self, request: Request) -> None:
        # Also a guard: a web page can't send this type to a local server, unasked.
        given = request.headers.get("content-type", "")
        if given.partition(";")[0].strip().lower() != TAR_TYPE:
            raise UnsupportedMediaError(
                f"The content-type must be {TAR_TYPE}, got {given[:100] or 'none'}."
            )
        declared = request.headers.get("content-length", "")
        if declared.isascii() and declared.isdigit() and len(declared) < 20:
            self._check(int(declared))  # refused before a byte of it is read
        if self._busy:
            raise QueueFullError("Another session file is coming in.", retry_after_s=5.0)

    async def _receive(self, request: Request, file: IO[bytes]) -> None:
        loop = asyncio.get_running_loop()
        waiting, received = bytearray(), 0
        deadline = loop.time() + FILE_TIMEOUT_S
        try:
            async with asyncio.timeout(STALL_TIMEOUT_S) as clock:
                async for piece in request.stream():
                    received += len(piece)
                    self._check(received)
                    waiting += piece
                    if len(waiting) >= PIECE_BYTES:
                        await asyncio.to_thread(file.write, bytes(waiting))
                        waiting.clear()
                    clock.reschedule(min(loop.time() + STALL_TIMEOUT_S, deadline))
        except TimeoutError:
            raise RequestTimeoutError(
                f"The session file came too slowly: {received} bytes are here. A pause may take "
                f"{STALL_TIMEOUT_S:g} s, the whole file {FILE_TIMEOUT_S:g} s."
            ) from None
        await asyncio.to_thread(file.write, bytes(waiting))
        file.flush()

    def _check(self, nbytes: int) -> None:
        most = self._state.max_import_bytes
        if nbytes > most:
            raise TooLargeError(
                f"The session file has {nbytes} bytes or more; max_import_bytes is {most}."
            )

    def _orders(self, file: IO[bytes], namespace: str) -> Generator[SessionOrder, Any, Imported]:
        if file.seek(0, 2) == 0:
            raise CapsuleError("This is no whole exported session: it is empty.")
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        found = read(data, self._state.engine)
        prompts = self._state.prompts
        conversation = found.conversation
        chain: tuple[bytes, ...] = ()
        record = None
        if conversation is not None:
            _refuse_unusable(conversation, prompts)
            chain = prompts.chain(conversation)
            if found.turns:
                last = found.turns[-1]
                asked = replace(conversation, messages=conversation.messages[: last.messages])
                record = record_at(prompts, asked, found.tokens[: last.position + 1])
        session = ImportSession(
            owner=owner_of(namespace),
            namespace=namespace,
            tokens=found.tokens,
            spans=found.spans,
            marks=found.marks,
            turns=found.turns,
            conversation=conversation,
            chain=chain,
            record=record,
        )
        return intake.steps(session, found.capsules)


def _refuse_unusable(conversation: Conversation, prompts: PromptBuilder) -> None:
    """Raises InvalidRequestError for what no request could have begun a session with: each turn of
    the session would be refused for it."""
    count = len(conversation.messages)
    if not 1 <= count <= MAX_MESSAGES:
        raise InvalidRequestError(
            f"messages: a session has 1 to {MAX_MESSAGES}, got {count}.", param="messages"
        )
    probe = {"role": "user", "content": "q"}
    tools, switches = list(conversation.tools), conversation.template_kwargs
    fields = {"messages": [probe], "tools": tools, "chat_template_kwargs": switches}
    if nests_deeper(fields, MAX_DEPTH):
        raise too_deep("The session")
    validated(ChatRequest, fields)
    prompts.build(replace(conversation, messages=(Message("user", "q"),)))
