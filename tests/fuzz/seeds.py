"""Where does a run begin? A few requests by hand that use every field, real ones where they are."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

from capserve.testing.replies import generate_replies

Json = dict[str, Any]

SHARED = Path(os.environ.get("CAPSERVE_SHARED", Path(__file__).parents[3] / "shared"))
TRACES = SHARED / "traces"
MOST_TRACE_BYTES = 40_000
"""Of one recorded request: larger ones are all system prompt, and slow to change."""

MARK = {"type": "ephemeral"}
SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "pattern": "^[a-z/]{1,20}$"},
        "limit": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}]},
        "mode": {"enum": ["r", "w", 3]},
        "tree": {"$ref": "#/$defs/node"},
    },
    "required": ["path"],
    "additionalProperties": False,
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        }
    },
}
FUNCTION = {"name": "write_file", "description": "Writes.", "parameters": SCHEMA, "strict": True}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "write_file", "arguments": '{"path": "a", "limit": 5}'},
}
SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": -0.1,
    "seed": 3,
    "logit_bias": {"5": 1.5},
}
REUSE = {
    "prompt_cache_key": "k",
    "cache_salt": "s",
    "flashrt_pin_prefix": 8,
    "flashrt_K": 2,
    "chat_template_kwargs": {"enable_thinking": False},
}


def chat() -> list[Json]:
    talk = [
        {"role": "system", "content": "Be short.", "cache_control": MARK},
        {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": MARK}]},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
        {"role": "user", "content": "And now?", "name": "joe"},
    ]
    schema = {"name": "r", "strict": True, "schema": SCHEMA}
    return [
        {"model": "nano", "messages": talk, "tools": [TOOL], "tool_choice": "auto", **SAMPLING},
        {"messages": talk[:2], "stop": ["x", "yz"], "n": 2, "logprobs": True, "top_logprobs": 2},
        {
            "messages": [{"role": "user", "content": "x"}],
            "response_format": {"type": "json_schema", "json_schema": schema},
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_completion_tokens": 9,
            **REUSE,
        },
        {
            "messages": talk[1:2],
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "write_file"}},
            "parallel_tool_calls": False,
            "ignore_eos": True,
            "return_token_ids": True,
            "reasoning_effort": "none",
            "user": "u",
            "store": True,
            "metadata": {"a": "b"},
        },
        {
            "messages": talk[1:2],
            "tools": [TOOL],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "write_file"}}],
                },
            },
            "thinking_budget": 3,
        },
        {"messages": [*talk[:2], {"role": "assistant", "content": "I would"}], "max_tokens": 5},
    ]


def completions() -> list[Json]:
    return [
        {"model": "nano", "prompt": "Once", "max_tokens": 4, "echo": True, **SAMPLING},
        {"prompt": [[5, 6, 7], "two"], "n": 2, "best_of": 2, "stop": "x", "stream": True},
        {"prompt": [5, 6], "logprobs": 3, "suffix": "", "ignore_eos": True, **REUSE},
    ]


def responses() -> list[Json]:
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "h"}]},
        {"type": "function_call", "name": "write_file", "arguments": "{}", "call_id": "c1"},
        {"type": "function_call_output", "call_id": "c1", "output": "done"},
        {"type": "custom_tool_call", "name": "patch", "input": "x", "call_id": "c2"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "ok"},
        {"role": "developer", "content": "Now."},
    ]
    tools = [
        {"type": "function", **FUNCTION},
        {"type": "custom", "name": "patch", "description": "free"},
        {"type": "namespace", "name": "ns", "tools": [{"type": "function", **FUNCTION}]},
        {"type": "web_search"},
    ]
    schema = {"type": "json_schema", "name": "r", "strict": True, "schema": SCHEMA}
    return [
        {"model": "nano", "input": items, "tools": tools, "tool_choice": "auto", "store": True},
        {"input": "Hi", "instructions": "Be short.", "text": {"format": schema}, "stream": True},
        {
            "input": "Hi",
            "reasoning": {"effort": "low", "summary": "auto"},
            "include": ["reasoning.encrypted_content"],
            "truncation": "auto",
            "max_output_tokens": 5,
            "tools": tools,
            "tool_choice": {"type": "custom", "name": "patch"},
            "parallel_tool_calls": False,
            **SAMPLING,
            **REUSE,
        },
        {
            "input": "Hi",
            "tools": tools,
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "custom", "name": "patch"}, {"type": "web_search"}],
            },
        },
        {"input": [{"type": "item_reference", "id": "msg_1"}], "previous_response_id": "resp_1"},
    ]


def messages() -> list[Json]:
    talk = [
        {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": MARK}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "write_file", "input": {"path": "a"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [{"type": "text", "text": "no"}],
                    "is_error": True,
                },
                {"type": "text", "text": "Go on"},
            ],
        },
        {"role": "system", "content": "Now."},
        {"role": "user", "content": "And?"},
    ]
    tool = {"name": "write_file", "description": "d", "input_schema": SCHEMA, "strict": True}
    return [
        {
            "model": "nano",
            "max_tokens": 9,
            "system": [{"type": "text", "text": "Be short.", "cache_control": MARK}],
            "messages": talk,
            "tools": [tool],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "stop_sequences": ["x"],
            "metadata": {"user_id": "u"},
        },
        {
            "model": "nano",
            "max_tokens": 3,
            "messages": talk[:1],
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"},
            "stream": True,
            "temperature": 0.3,
            **REUSE,
        },
        {
            "model": "nano",
            "max_tokens": 3,
            "messages": talk[:1],
            "tools": [tool],
            "tool_choice": {"type": "tool", "name": "write_file"},
            "cache_control": MARK,
        },
    ]


def tokenize() -> list[Json]:
    return [
        {"prompt": "Hello <think>", "return_token_strs": True, "add_special_tokens": False},
        {**chat()[0], "add_generation_prompt": False},
        {"tokens": [5, 6, 7], "model": "nano"},
    ]


def schemas() -> list[Json]:
    """Constraints: what the grammar is made of."""
    text = {"type": "string", "minLength": 1, "maxLength": 20, "format": "date"}
    number = {"type": "number", "minimum": -1.5, "exclusiveMaximum": 7, "multipleOf": 0.5}
    array = {"type": "array", "items": text, "prefixItems": [number], "minItems": 1, "maxItems": 4}
    mixed = {
        "type": "object",
        "properties": {"s": text, "n": number, "a": array, "o": {"oneOf": [text, number]}},
        "patternProperties": {"^x": {"const": 1}},
        "allOf": [{"required": ["s"]}],
    }
    return [
        {"schema": SCHEMA, "strict": True, "tools": [FUNCTION]},
        {"schema": mixed, "strict": True, "tools": []},
        {"schema": None, "tools": [FUNCTION, {"name": "g", "parameters": mixed}], "choice": 1},
    ]


def replies() -> list[bytes]:
    """Head (see `targets.output`) and text of what a model might write."""
    made = [reply.text.encode() for reply in generate_replies(24, seed=11)]
    return [bytes([i % 32, 0]) + text for i, text in enumerate(made)] + [
        b"\x03\x02\x01x\x03</t<think>a</t</think>x",
        b"\x02\x00\xf0\x9f\x98<tool_call>\n<function=f>\n</function>\n</tool_call>",
    ]


@functools.cache
def recorded() -> dict[str, list[bytes]]:
    """Bodies of real clients by path, the small ones; nothing where the recordings are not."""
    found: dict[str, list[bytes]] = {}
    for file in sorted(TRACES.glob("*/*.jsonl")):
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            body = entry.get("body")
            if isinstance(body, dict):
                text = json.dumps(body, ensure_ascii=False).encode()
                if len(text) <= MOST_TRACE_BYTES:
                    found.setdefault(str(entry.get("path")), []).append(text)
    return found
