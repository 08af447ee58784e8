"""How is a bare text a prompt, without a conversation and without a template?

Its tokens are all that matters: state is shared with any prompt that begins with them. As a
conversation it is one assistant message that is being written, so a reply goes on in it and makes
no record: what a template would make of that message are other tokens.
"""

from __future__ import annotations

from capserve.text.messages import Conversation, Message
from capserve.text.prompt import Prompt, PromptBuilder, TokenArray


def raw_prompt(tokens: TokenArray, text: str, prompts: PromptBuilder) -> Prompt:
    """The prompt of `tokens` (int32, at least one), which spell `text`."""
    assert len(tokens), "an empty text is no prompt"
    # Reasoning that is known to be none: nothing is taken out of the text.
    conversation = Conversation((Message("assistant", text, reasoning=""),))
    return Prompt(
        tokens=tokens,
        conversation=conversation,
        chain=prompts.chain(conversation),
        system_end=0,
        prompt_end=len(tokens),
        continues_reply=True,
    )
