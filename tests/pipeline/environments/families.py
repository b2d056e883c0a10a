"""Chat templates of twelve families, written to the rules of the public ones, over two small tokenizers.

Each follows its family in what matters here: the marks, the end token, what happens to thinking, where tools and their
results stand, and what it refuses."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import cache
from typing import Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from pipeline.data.tokenizer import TextTokenizer


@dataclass(frozen=True)
class Family:
    template: str
    specials: tuple[str, ...]
    end: str
    """What the model writes at the end of a turn."""
    bos: str = ""
    eos: str = ""
    kind: Literal["bytes", "words"] = "bytes"
    other_ends: tuple[str, ...] = ()
    strips_space_after: tuple[str, ...] = ()


CHATML = """{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system
Be of use.<|im_end|>
{% endif %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

_HERMES_HEAD = """{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
{{- 'Tools:\n<tools>' }}
{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
{{- '\n</tools>\nCall as <tool_call>\n{"name": N, "arguments": A}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}"""
_HERMES_CALLS = """{%- for call in m.tool_calls or [] %}
{%- if (loop.first and content) or not loop.first %}{{- '\n' }}{%- endif %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}"""
_HERMES_RESULT = """{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- endif %}{%- endfor %}"""
QWEN25 = (
    _HERMES_HEAD
    + """{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}
{%- set content = m.content or '' %}
{{- '<|im_start|>assistant\n' + content }}"""
    + _HERMES_CALLS
    + _HERMES_RESULT
    + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)

QWEN3 = (
    _HERMES_HEAD
    + """{%- set ns = namespace(last=messages | length - 1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}
{%- set content = m.content or '' %}{%- set thinking = '' %}
{%- if m.reasoning_content is string %}{%- set thinking = m.reasoning_content %}
{%- elif '</think>' in content %}
{%- set thinking = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last and (loop.last or thinking) %}
{{- '<think>\n' + thinking.strip('\n') + '\n</think>\n\n' }}
{%- endif %}
{{- content }}"""
    + _HERMES_CALLS
    + _HERMES_RESULT
    + """{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""
)

LLAMA3 = """{{- bos_token }}
{%- if tools is not none and tools %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\nAnswer with {"name": N, "parameters": P}.' }}
{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}{{- '<|eot_id|>' }}
{%- endif %}
{%- for m in messages %}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- m.tool_calls[0].function.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- elif m.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + (m.content | tojson) + '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

MISTRAL = """{{- bos_token }}
{%- set ns = namespace(i=0, last=-1) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{%- if (m.role == 'user') != (ns.i % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
{%- set ns.i = ns.i + 1 %}
{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and loop.index0 == ns.last %}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST] ' + m.content + '[/INST]' }}
{%- elif m.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('ids have nine characters') }}{%- endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- ', "id": "' + call.id + '"}' }}
{{- ', ' if not loop.last else ']' + eos_token }}
{%- endfor %}
{%- elif m.role == 'assistant' %}{{- ' ' + m.content | trim + eos_token }}
{%- elif m.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + (m.content | tojson) + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{- raise_exception('only user, assistant and tool') }}
{%- endif %}
{%- endfor %}"""

GEMMA = """{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

_DEEPSEEK = """{{- bos_token }}{%- set ns = namespace(is_tool=false, is_first=true) %}
{%- for m in messages %}
{%- if m.role == 'system' %}{{- m.content }}
{%- elif m.role == 'user' %}{%- set ns.is_tool = false %}{{- '<｜User｜>' + m.content }}
{%- elif m.role == 'assistant' and m.tool_calls %}
{%- set ns.is_tool = false %}
{%- for call in m.tool_calls %}
{{- '<｜Assistant｜><｜tool▁calls▁begin｜>' if loop.first else '\n' }}
{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\n```json\n' + call.function.arguments + '\n```' }}
{{- '<｜tool▁call▁end｜>' }}
{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' if loop.last }}
{%- endfor %}
{%- elif m.role == 'assistant' %}
{%- set content = m.content %}
{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
{{- ('<｜tool▁outputs▁end｜>' if ns.is_tool else '<｜Assistant｜>') + content + '<｜end▁of▁sentence｜>' }}
{%- set ns.is_tool = false %}
{%- elif m.role == 'tool' %}
{{- '\n' if ns.is_tool else '<｜tool▁outputs▁begin｜>' }}
{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- set ns.is_tool = true %}
{%- endif %}
{%- endfor %}
{%- if ns.is_tool %}{{- '<｜tool▁outputs▁end｜>' }}{%- endif %}"""
DEEPSEEK_V3 = _DEEPSEEK + "{%- if add_generation_prompt and not ns.is_tool %}{{- '<｜Assistant｜>' }}{%- endif %}"
DEEPSEEK_R1 = (
    _DEEPSEEK + "{%- if add_generation_prompt and not ns.is_tool %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}"
)

GLM = """[gMASK]<sop>
{%- if tools %}{{- '<|system|>\nTools:' }}{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<|user|>\n' + m.content }}
{%- elif m.role == 'system' %}{{- '<|system|>\n' + m.content }}
{%- elif m.role == 'assistant' %}
{{- '<|assistant|>' }}
{%- if loop.index0 > ns.last and m.reasoning_content %}{{- '\n<think>' + m.reasoning_content.strip() + '</think>' }}
{%- else %}{{- '\n<think></think>' }}{%- endif %}
{%- if m.content and m.content.strip() %}{{- '\n' + m.content.strip() }}{%- endif %}
{%- for call in m.tool_calls or [] %}
{{- '\n<tool_call>' + call.function.name }}
{%- for key, value in call.function.arguments.items() %}
{{- '\n<arg_key>' + key + '</arg_key>\n<arg_value>' + (value if value is string else value | tojson) + '</arg_value>' }}
{%- endfor %}
{{- '\n</tool_call>' }}
{%- endfor %}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{%- endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""

PHI3 = """{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}{{ '<|' + m.role + '|>
' + m.content + '<|end|>
' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>
' }}{% endif %}"""

PHI4 = """{% for m in messages %}{% if m.role != 'tool' %}
{{- '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"""

GRANITE = """{%- if tools %}
{{- '<|start_of_role|>available_tools<|end_of_role|>' + (tools | tojson) + '<|end_of_text|>\n' }}{%- endif %}
{%- for m in messages %}
{%- set role = 'tool_response' if m.role == 'tool' else m.role %}
{{- '<|start_of_role|>' + role + '<|end_of_role|>' + (m.content or '') }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '</tool_call>' }}
{%- endfor %}{{- '<|end_of_text|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"""

_IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_THINK = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_TURN = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin_of_text|>", "<|end_of_text|>")
_CUT = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁sep｜>")
_SEA = tuple(f"<｜tool▁{what}▁{end}｜>" for what in ("calls", "call", "outputs", "output") for end in ("begin", "end"))
_INST = (
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)
_GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")

FAMILIES = {
    "smollm2": Family(CHATML, _IM, "<|im_end|>", eos="<|im_end|>", other_ends=("<|endoftext|>",)),
    "qwen2.5": Family(QWEN25, _IM, "<|im_end|>", eos="<|im_end|>", other_ends=("<|endoftext|>",)),
    "qwen3": Family(QWEN3, (*_IM, *_THINK), "<|im_end|>", eos="<|im_end|>", other_ends=("<|endoftext|>",)),
    "llama3": Family(LLAMA3, _TURN, "<|eot_id|>", "<|begin_of_text|>", "<|eot_id|>", other_ends=("<|end_of_text|>",)),
    "mistral": Family(MISTRAL, (*_INST, "<s>", "</s>"), "</s>", "<s>", "</s>", kind="words"),
    "gemma": Family(
        GEMMA, ("<start_of_turn>", "<end_of_turn>", "<bos>", "<eos>"), "<end_of_turn>", "<bos>", "<eos>", kind="words"
    ),
    "deepseek-v3": Family(DEEPSEEK_V3, (*_CUT, *_SEA, *_THINK), _CUT[1], _CUT[0], _CUT[1]),
    "deepseek-r1": Family(DEEPSEEK_R1, (*_CUT, *_SEA, *_THINK), _CUT[1], _CUT[0], _CUT[1]),
    "glm": Family(GLM, (*_GLM, *_THINK), "", other_ends=("<|endoftext|>", "<|user|>", "<|observation|>")),
    "phi3": Family(
        PHI3,
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
        "<|end|>",
        eos="<|endoftext|>",
        kind="words",
        strips_space_after=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    ),
    "phi4": Family(PHI4, (*_IM, "<|im_sep|>"), "<|im_end|>", eos="<|im_end|>", other_ends=("<|endoftext|>",)),
    "granite": Family(
        GRANITE, ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"), "<|end_of_text|>", eos="<|end_of_text|>"
    ),
}

_WORDS = "so the sum of two and three is five, because we add them: 2 + 3 = 5. Then look around! {name arguments value}"


@cache
def family_tokenizer(name: str) -> TextTokenizer:
    """Return a family's template over a small tokenizer that was trained on a few words."""
    family = FAMILIES[name]
    if family.kind == "bytes":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
        made.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        made.normalizer = normalizers.Replace(" ", "▁")  # pyright: ignore[reportAttributeAccessIssue]
        made.decoder = decoders.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        alphabet = [chr(code) for code in range(33, 127)] + ["\n"]
    rng = random.Random(1)
    lines = [" ".join(rng.sample(_WORDS.split(), 8)) for _ in range(400)]
    first = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))] if family.kind == "words" else []
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False, initial_alphabet=alphabet, special_tokens=first)
    made.train_from_iterator(lines, trainer)
    if family.kind == "words":
        # the bytes are tokens of the model, not special ones
        data = json.loads(made.to_str())
        data["added_tokens"] = []
        made = Tokenizer.from_str(json.dumps(data))
    made.add_special_tokens(
        [AddedToken(text, special=True, rstrip=text in family.strips_space_after) for text in family.specials]
    )
    specials = {"bos_token": family.bos, "eos_token": family.eos}
    return TextTokenizer(made, {key: text for key, text in specials.items() if text}, family.template, name)


def family_ends(name: str) -> list[int]:
    family, tokenizer = FAMILIES[name], family_tokenizer(name)
    found = [tokenizer.token_id(text) for text in (family.end, family.eos, *family.other_ends) if text]
    return [token for token in found if token is not None]
