"""The conversation that a response ends, as a reward model's token ids.

With a chat template of its own, the reward model reads the line's messages and the response as the
assistant's. A prompt that was sampled from as text is one message of the user.
Without one it reads the texts of prompt and response, end to end, with the special tokens that its
tokenizer adds to any text. Either way the text is tokenised anew, since its tokens need not be the
policy's. Nothing is cut: half a response is another response."""

from __future__ import annotations

import numpy as np

from pipeline.data.tokenizer import TextTokenizer
from protocol.trajectory import Prompt

MESSAGES = "messages"
"""Key of a prompt's conversation in its ``extra``, before rendering; kept with a reward
model, and with guidance."""


CHAT_VARIABLES = "chat_variables"
"""Key of the chat template's variables beside these messages, where there are any."""


def conversation_tokens(tokenizer: TextTokenizer, prompt: Prompt, response: str) -> np.ndarray:
    """Return int32 [tokens]. Raises DataError when the chat template refuses the messages."""
    if not tokenizer.has_chat_template:
        return np.array(tokenizer.encode(prompt.text + response), np.int32)
    before = prompt.extra.get(MESSAGES) or [{"role": "user", "content": prompt.text}]
    messages = [*before, {"role": "assistant", "content": response}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    # the template writes them itself
    return np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
