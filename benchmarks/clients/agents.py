"""Which agents are run, at which version, and how is each told where the server is?

Settings are those that a user would write, with what phones home switched off. Each agent has a
home folder of its own: `prepare` writes its files there, `command` and `variables` start it.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

KEY = "none"
"""The server has no keys; the agents want one all the same."""

CONTEXT_TOKENS, OUTPUT_TOKENS = 32_768, 2_048
"""What nano has, and what a reply of it may take before it counts as lost."""


BARE = "--bare"
BARE_PROMPT = "You are a coding agent."

CHAT, RESPONSES, MESSAGES = "chat", "responses", "messages"
"""The dialects."""


class Agent(ABC):
    """`form` tells two ways to run the same agent apart.

    One of them is `BARE`, the agent's own switch for a short prompt. nano was trained with few
    tools on rows of 16,384 tokens, so under the longest prompts it may call a wrong one. Those
    requests are looked at all the same.
    """

    name: ClassVar[str]
    package: ClassVar[str]
    version: ClassVar[str]

    def __init__(self, dialect: str, form: str = "") -> None:
        self.dialect = dialect
        self.form = form

    @property
    def title(self) -> str:
        return f"{self.name} {self.form}".rstrip()

    @abstractmethod
    def prepare(self, home: Path, url: str) -> None:
        """Write settings below `home`. `url` has no path."""

    @abstractmethod
    def command(self, task: str, *, go_on: bool) -> list[str]:
        """The program and its arguments, to be run in the folder that it works on.

        `go_on`: in the conversation before this one.
        """

    def variables(self, url: str) -> Mapping[str, str]:
        return {}


class QwenCode(Agent):
    name = "qwen-code"
    package, version = "@qwen-code/qwen-code", "0.24.4"

    def prepare(self, home: Path, url: str) -> None:
        _write_json(
            home / ".qwen" / "settings.json",
            {
                "privacy": {"usageStatisticsEnabled": False},
                "telemetry": {"enabled": False},
                "general": {"disableAutoUpdate": True, "enableAutoUpdate": False},
                "security": {"auth": {"selectedType": "openai"}},
            },
        )

    def command(self, task: str, *, go_on: bool) -> list[str]:
        bare = [BARE, "--system-prompt", BARE_PROMPT] if self.form == BARE else []
        more = ["--continue"] if go_on else []
        return ["qwen", "--auth-type", "openai", "-y", *bare, *more, "-p", task]

    def variables(self, url: str) -> Mapping[str, str]:
        return {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": KEY,
            "OPENAI_MODEL": "nano",
            "QWEN_TELEMETRY_ENABLED": "false",
            "QWEN_USAGE_STATISTICS_ENABLED": "false",
        }


class OpenCode(Agent):
    """`form`: the SDK that it speaks through."""

    name = "opencode"
    package, version = "opencode-ai", "1.18.33"

    def prepare(self, home: Path, url: str) -> None:
        limit = {"context": CONTEXT_TOKENS, "output": OUTPUT_TOKENS}
        model = {"tool_call": True, "reasoning": True, "limit": limit}
        provider = {
            "npm": self.form or "@ai-sdk/openai-compatible",
            "options": {"baseURL": f"{url}/v1", "apiKey": KEY},
            "models": {"nano": model},
        }
        _write_json(
            home / ".config" / "opencode" / "opencode.json",
            {
                "autoupdate": False,
                "share": "disabled",
                "permission": {"*": "allow"},
                "provider": {"local": provider},
            },
        )

    def command(self, task: str, *, go_on: bool) -> list[str]:
        more = ["--continue"] if go_on else []
        return ["opencode", "run", *more, "--model", "local/nano", task]

    def variables(self, url: str) -> Mapping[str, str]:
        off = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")
        return {f"OPENCODE_DISABLE_{what}": "1" for what in off}


class Codex(Agent):
    name = "codex"
    package, version = "@openai/codex", "0.171.0"

    def prepare(self, home: Path, url: str) -> None:
        # Its sandbox needs rights that a container seldom has; the folder is a throw-away.
        text = f"""\
model = "nano"
model_provider = "local"
model_context_window = {CONTEXT_TOKENS}
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
web_search = "disabled"

[features]
plugins = false
apps = false

[model_providers.local]
name = "local"
base_url = "{url}/v1"
env_key = "LOCAL_API_KEY"
wire_api = "responses"

[analytics]
enabled = false

[feedback]
enabled = false

[otel]
exporter = "none"
"""
        path = home / ".codex" / "config.toml"
        path.parent.mkdir(parents=True)
        path.write_text(text, encoding="utf-8")

    def command(self, task: str, *, go_on: bool) -> list[str]:
        more = ["resume", "--last"] if go_on else []
        return ["codex", "exec", "--skip-git-repo-check", *more, task]

    def variables(self, url: str) -> Mapping[str, str]:
        return {"LOCAL_API_KEY": KEY}


class ClaudeCode(Agent):
    name = "claude-code"
    package, version = "@anthropic-ai/claude-code", "2.1.332"

    def prepare(self, home: Path, url: str) -> None:
        """All is said by variables."""

    def command(self, task: str, *, go_on: bool) -> list[str]:
        bare = [BARE] if self.form == BARE else []
        more = ["--continue"] if go_on else []
        return ["claude", "-p", "--dangerously-skip-permissions", *bare, *more, task]

    def variables(self, url: str) -> Mapping[str, str]:
        models = (
            "ANTHROPIC_MODEL",
            "ANTHROPIC_SMALL_FAST_MODEL",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL",
            "ANTHROPIC_DEFAULT_SONNET_MODEL",
            "ANTHROPIC_DEFAULT_OPUS_MODEL",
            "CLAUDE_CODE_SUBAGENT_MODEL",
        )
        off = (
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",
            "DISABLE_TELEMETRY",
            "DISABLE_AUTOUPDATER",
            "DISABLE_ERROR_REPORTING",
        )
        return {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_AUTH_TOKEN": KEY,
            "IS_SANDBOX": "1",
            **dict.fromkeys(models, "nano"),
            **dict.fromkeys(off, "1"),
        }


AGENTS: tuple[Agent, ...] = (
    QwenCode(CHAT),
    QwenCode(CHAT, BARE),
    OpenCode(CHAT),
    OpenCode(RESPONSES, "@ai-sdk/openai"),
    OpenCode(MESSAGES, "@ai-sdk/anthropic"),
    Codex(RESPONSES),
    ClaudeCode(MESSAGES),
    ClaudeCode(MESSAGES, BARE),
)


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
