"""``workers.early CONFIG ROLE DESCRIPTOR ROOM``: a vLLM worker's process, begun while its run is still
being checked.

It imports what the worker imports, and then becomes it. vLLM starts threads when it is imported, so
its workers cannot be forked of the starter. If the checks ask what vLLM says of the configuration,
this process answers, which saves them an import. It touches no device and nothing of the run
before it is the worker, and ends with the process that started it
(``pipeline.supervisor.starter``)."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pipeline.config.load import load_config
from pipeline.process.exit_codes import ExitCode
from pipeline.process.forking import serve_once
from protocol.errors import HeadraceError
from protocol.ids import Role
from workers import __main__ as worker
from workers.preparation import import_all

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig


def main() -> NoReturn:
    """Import, and become the worker; without one end with the parent."""
    file, role, descriptor, _ = sys.argv[1:]
    config = load_config([Path(file)])
    # the worker meets a failed import again, and reports it
    with suppress(Exception):
        import_all(config, [Role(role)])
        from workers.engines.generation.vllm.build import import_vllm

        import_vllm(config, Role(role))
    with socket.socket(fileno=int(descriptor)) as channel:
        serve_once(channel, _work, partial(_check, config))
    os._exit(0)


def _check(config: RunConfig) -> tuple[int, str]:
    from workers.engines.generation.vllm.check import check

    try:
        check(config)
    except HeadraceError as error:
        return ExitCode.CONFIG, str(error)
    return ExitCode.OK, ""


def _work(arguments: Sequence[str]) -> NoReturn:
    sys.argv[:] = arguments[arguments.index("workers") :]
    worker.main()


if __name__ == "__main__":
    main()
