from __future__ import annotations

from pathlib import Path

import pytest

from tests.byte_tokenizer import write_byte_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}\n"
    "{% generation %}{{ message.role }}: {{ message.content | tojson }}{% endgeneration %}\n"
    "{% endfor %}{% if add_generation_prompt %} assistant:{% endif %}"
)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(tmp_path_factory.mktemp("model"), TEMPLATE)
