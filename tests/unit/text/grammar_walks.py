"""Replies that a grammar lets through: walks over its masks, pushed towards an end.

A uniform walk over a vocabulary would hardly ever write a closing tag. This one begins one now and
then, and follows it for as long as the grammar does.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from capserve.text.grammar import Grammar, Matcher
from capserve.text.messages import Message
from capserve.text.output import OutputSpec, TurnOutput
from capserve.text.tokenizer import Tokenizer

CLOSERS = (
    "\n</parameter>\n<parameter=",
    "\n</parameter>\n</function>",
    "</function>",
    "</think>",
    "<tool_call>",
    '"',
    "}",
    "]",
    "</parameter>\n",
    "<function=",
)


def allowed(matcher: Matcher) -> np.ndarray:
    """Ids that may come next, ascending."""
    mask = matcher.mask()
    assert mask is not None
    return np.nonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0]


def refused_at(grammar: Grammar, tokenizer: Tokenizer, text: str) -> int | None:
    """Bytes of `text` that the grammar follows before it refuses; None when it takes all."""
    matcher, taken = grammar.matcher(), 0
    for token in tokenizer.encode(text).tolist():
        if token not in allowed(matcher):
            return taken
        matcher.advance(token)
        taken += len(tokenizer.token_bytes(token))
    return None


def takes(grammar: Grammar, tokenizer: Tokenizer, text: str) -> bool:
    """The whole of `text` is a reply that may end."""
    matcher = grammar.matcher()
    for token in tokenizer.encode(text).tolist():
        if token not in allowed(matcher):
            return False
        matcher.advance(token)
    return matcher.done


def walk(
    grammar: Grammar, tokenizer: Tokenizer, ends: tuple[int, ...], rng: random.Random, most: int
) -> list[int] | None:
    """A reply with its end token; None when `most` tokens did not end it."""
    closers = [tokenizer.encode(text).tolist() for text in CLOSERS]
    matcher, said, plan = grammar.matcher(), [], []
    while len(said) < most:
        ids = allowed(matcher)
        assert len(ids), "a mask that allows nothing"
        some = set(ids.tolist())
        stops = [end for end in ends if end in some]
        if plan and plan[0] in some:
            token = plan.pop(0)
        elif stops and (len(some) == len(stops) or rng.random() < 0.3):
            token = stops[0]
        else:
            starts = [closer for closer in closers if closer[0] in some]
            plan = list(rng.choice(starts)) if starts and rng.random() < 0.5 else []
            token = plan.pop(0) if plan else rng.choice([i for i in some if i not in ends])
        said.append(token)
        if token in ends:
            return said
        matcher.advance(token)
    return None


def read(
    tokenizer: Tokenizer,
    ends: tuple[int, ...],
    said: list[int],
    tools: tuple[Mapping[str, Any], ...] = (),
    *,
    starts_in_reasoning: bool = False,
) -> Message:
    """What the server makes of these tokens."""
    spec = OutputSpec(tools=tools, starts_in_reasoning=starts_in_reasoning)
    output = TurnOutput(spec, tokenizer, ends)
    output.feed(said)
    output.finish()
    return output.message()


def tool(name: str, parameters: Mapping[str, Any], *, strict: bool = True) -> dict[str, Any]:
    function = {"name": name, "strict": strict, "parameters": parameters}
    return {"type": "function", "function": function}


def arguments(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    """A strict parameter schema; everything is required unless said otherwise."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }
