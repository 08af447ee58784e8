"""An agent framework's models of this server, one for each protocol; nothing else is set up."""

from __future__ import annotations

from typing import Any

from harness import NAME
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

PROTOCOLS = ("chat", "responses", "messages")


def model(protocol: str, url: str, **settings: Any) -> Model:
    """`url` without `/v1`."""
    if protocol == "messages":
        anthropic = AnthropicProvider(base_url=url, api_key="any")
        return AnthropicModel(
            NAME,
            provider=anthropic,
            settings=settings or None,
            profile={"supports_json_schema_output": True},  # not known of a model of this name
        )
    openai = OpenAIProvider(base_url=f"{url}/v1", api_key="any")
    made = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[protocol]
    return made(NAME, provider=openai, settings=settings or None)
