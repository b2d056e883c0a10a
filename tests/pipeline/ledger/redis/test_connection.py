"""The connection of all ledger calls: each gets its own answer at once, and fails alone."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import hiredis
import pytest
import redis.asyncio
from redis import exceptions

from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.connection import MAX_UNANSWERED, PipelinedConnection

pytestmark = pytest.mark.timeout(30)

PUSH = "redis.call('RPUSH', KEYS[1], ARGV[1]); return ARGV[1]"
FAIL = "return redis.error_reply('FENCED 7')"


@pytest.fixture
async def link(redis_server, redis_client) -> AsyncIterator[PipelinedConnection]:
    client = connect(redis_server)
    link = PipelinedConnection(client)
    yield link
    await link.aclose()
    await client.aclose()


async def together(calls) -> list[Any]:
    """Return answers and errors of calls that are made in one turn of the loop."""

    async def settled(call: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await call
        except exceptions.RedisError as error:
            return error

    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(settled(call)) for call in calls]
    return [task.result() for task in asked]


# -- on a real server ----------------------------------------------------------------------------


async def test_each_caller_gets_its_own_answer_in_the_order_of_asking(link, redis_client):
    names = [f"{number}".encode() for number in range(3 * MAX_UNANSWERED)]
    assert await together([link.ask("EVAL", PUSH, 1, "list", name) for name in names]) == names
    assert await redis_client.lrange("list", 0, -1) == names


async def test_what_is_asked_in_one_turn_of_the_loop_leaves_together(link, redis_client):
    async def num_reads() -> int:
        return (await redis_client.info("stats"))["total_reads_processed"]

    await link.ask("PING")
    before = await num_reads()
    await together([link.ask("PING") for _ in range(20)])
    assert await num_reads() - before == 2, "one of the twenty, one of this question"


async def test_values_longer_than_any_buffer_arrive_whole_and_in_order(link):
    values = [bytes([number]) * (1 << 20) for number in range(12)]
    await together([link.ask("SET", number, value) for number, value in enumerate(values)])
    assert await link.ask_all([("GET", number) for number in range(12)]) == values


async def test_many_questions_of_one_caller_are_answered_in_order_beside_those_of_others(link):
    async with asyncio.TaskGroup() as tasks:
        many = [
            tasks.create_task(link.ask_all([("ECHO", f"{caller}.{number}") for number in range(2 * MAX_UNANSWERED)]))
            for caller in range(3)
        ]
        one = tasks.create_task(link.ask("ECHO", "alone"))
    for caller, task in enumerate(many):
        assert task.result() == [f"{caller}.{number}".encode() for number in range(2 * MAX_UNANSWERED)]
    assert one.result() == b"alone"
    assert await link.ask_all([]) == []


async def test_a_call_that_fails_fails_alone(link, redis_client):
    answers = await together([link.ask("EVAL", FAIL if number == 2 else PUSH, 1, "list", "x") for number in range(5)])
    assert [isinstance(answer, exceptions.ResponseError) for answer in answers] == [False, False, True, False, False]
    assert str(answers[2]) == "FENCED 7"
    assert await redis_client.llen("list") == 4


async def test_one_of_many_that_fails_fails_them_all_after_they_were_heard(link, redis_client):
    with pytest.raises(exceptions.ResponseError, match="WRONGTYPE"):
        await link.ask_all([("SET", "text", "x"), ("RPUSH", "text", "y"), ("RPUSH", "list", "z")])
    assert await redis_client.llen("list") == 1
    assert await link.ask("PING") == b"PONG"


async def test_an_argument_that_cannot_be_sent_is_refused_and_nothing_is_sent(link):
    with pytest.raises(exceptions.DataError):
        await link.ask("SET", "key", None)
    assert await link.ask("EXISTS", "key") == 0


async def test_a_caller_that_is_cancelled_takes_no_answer_away_from_others(link):
    async with asyncio.TaskGroup() as tasks:
        await link.ask("PING")
        given_up = tasks.create_task(link.ask("ECHO", "given up"))
        other = tasks.create_task(link.ask("ECHO", "mine"))
        # both have sent
        await asyncio.sleep(0)
        given_up.cancel()
    assert given_up.cancelled()
    assert other.result() == b"mine"
    assert await link.ask("ECHO", "next") == b"next"


async def test_a_connection_that_the_server_closed_is_made_anew(link, redis_client):
    assert await link.ask("PING") == b"PONG"
    await redis_client.client_kill_filter(skipme=True)
    assert await together([link.ask("ECHO", number) for number in range(3)]) == [b"0", b"1", b"2"]


async def test_a_closed_link_fails_what_waits_and_can_be_closed_again(redis_server):
    client = connect(redis_server, patience_s=0.3)
    link = PipelinedConnection(client)
    await link.ask("PING")
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(together([link.ask("BLPOP", "nothing", 0)]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await link.aclose()
    assert isinstance(waiting.result()[0], exceptions.ConnectionError)
    await link.aclose()
    await client.aclose()


async def test_a_client_that_cannot_be_taken_over_is_refused(redis_server):
    client = redis.asyncio.Redis.from_url(redis_server)
    with pytest.raises(TypeError, match=r"with pipeline\.ledger\.redis\.client\.connect"):
        PipelinedConnection(client)
    await client.aclose()


async def test_a_server_that_is_away_is_away_for_all_that_ask():
    client = connect("unix:///nonexistent/socket", patience_s=0.1)
    link = PipelinedConnection(client)
    answers = await together([link.ask("PING") for _ in range(3)])
    assert all(isinstance(answer, exceptions.ConnectionError) for answer in answers)
    await client.aclose()


# -- on a scripted server ------------------------------------------------------------------------


class Puppet:
    """Greets as a server does, records commands by connection, and sends a test's answers."""

    def __init__(self) -> None:
        self.asked: list[list[Any]] = []
        self.writers: list[asyncio.StreamWriter] = []
        self._notifications = asyncio.Event()

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._notifications.clear()
            await self._notifications.wait()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked: list[Any] = []
        commands = hiredis.Reader()
        is_counted = False
        while data := await reader.read(1 << 16):
            commands.feed(data)
            while (command := commands.gets()) is not False:
                if command[0] == b"HELLO":
                    writer.write(b"%1\r\n$5\r\nproto\r\n:3\r\n")
                elif command[0] in (b"CLIENT", b"PING"):
                    writer.write(b"+OK\r\n" if command[0] == b"CLIENT" else b"+PONG\r\n")
                else:
                    if not is_counted:
                        is_counted = True
                        self.asked.append(asked)
                        self.writers.append(writer)
                    asked.append(command[-1])
                    self._notifications.set()
        writer.close()


@pytest.fixture
async def puppet() -> AsyncIterator[tuple[Puppet, str]]:
    puppet = Puppet()
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        server = await asyncio.start_unix_server(puppet.serve, Path(folder) / "s")
        yield puppet, f"unix://{folder}/s"
        for writer in puppet.writers:
            writer.close()
        server.close()
        await server.wait_closed()


@pytest.fixture
async def asking(puppet) -> AsyncIterator[Callable[..., tuple[PipelinedConnection, Puppet]]]:
    opened = []

    def make(**settings: Any) -> tuple[PipelinedConnection, Puppet]:
        client = connect(puppet[1], **settings)
        opened.append((client, PipelinedConnection(client)))
        return opened[-1][1], puppet[0]

    yield make
    for client, link in opened:
        await link.aclose()
        await client.aclose()


async def test_an_answer_is_handed_over_while_others_are_outstanding(asking):
    link, puppet = asking()
    async with asyncio.TaskGroup() as tasks:
        first, second = (tasks.create_task(link.ask("ECHO", name)) for name in "ab")
        await puppet.until(lambda: puppet.asked == [[b"a", b"b"]])
        puppet.writers[0].write(b"+a\r\n")
        assert await first == b"a"
        assert not second.done()
        third = tasks.create_task(link.ask("ECHO", "c"))
        await puppet.until(lambda: puppet.asked == [[b"a", b"b", b"c"]])
        puppet.writers[0].write(b"+b\r\n+c\r\n")
    assert (second.result(), third.result()) == (b"b", b"c")


async def test_no_more_than_the_limit_is_ever_unanswered(asking):
    link, puppet = asking()
    async with asyncio.TaskGroup() as tasks:
        alone = [tasks.create_task(link.ask("ECHO", number)) for number in range(MAX_UNANSWERED)]
        many = tasks.create_task(link.ask_all([("ECHO", number) for number in range(MAX_UNANSWERED)]))
        await puppet.until(lambda: bool(puppet.asked) and len(puppet.asked[0]) == MAX_UNANSWERED)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(puppet.asked[0]) == MAX_UNANSWERED
        for done in range(1, 2 * MAX_UNANSWERED + 1):
            puppet.writers[0].write(b":%d\r\n" % (done - 1))
            await puppet.until(lambda: len(puppet.asked[0]) == min(2 * MAX_UNANSWERED, MAX_UNANSWERED + done))  # noqa: B023
    assert [task.result() for task in alone] == list(range(MAX_UNANSWERED))
    assert many.result() == list(range(MAX_UNANSWERED, 2 * MAX_UNANSWERED))


async def test_whoever_is_cancelled_with_room_at_last_leaves_it_to_the_next(asking):
    link, puppet = asking()
    waiting: list[asyncio.Task[Any]] = []

    async def ask_and_cancel() -> None:
        await link.ask("ECHO", "first")
        # which the same answer has woken
        waiting[0].cancel()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ask_and_cancel())
        others = [tasks.create_task(link.ask("ECHO", number)) for number in range(MAX_UNANSWERED - 1)]
        waiting += [tasks.create_task(link.ask("ECHO", name)) for name in ("given up", "next")]
        await puppet.until(lambda: bool(puppet.asked) and len(puppet.asked[0]) == MAX_UNANSWERED)
        puppet.writers[0].write(b"+first\r\n")
        await puppet.until(lambda: len(puppet.asked[0]) == MAX_UNANSWERED + 1)
        puppet.writers[0].write(b"+other\r\n" * (MAX_UNANSWERED - 1) + b"+next\r\n")
    assert puppet.asked[0][-1] == b"next"
    assert waiting[0].cancelled()
    assert waiting[1].result() == b"next"
    assert {other.result() for other in others} == {b"other"}


async def test_what_waits_for_room_on_a_lost_connection_is_asked_on_the_next(asking):
    link, puppet = asking()
    count = MAX_UNANSWERED + 5
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(link.ask("ECHO", number)) for number in range(count)]
        await puppet.until(lambda: bool(puppet.asked) and len(puppet.asked[0]) == MAX_UNANSWERED)
        puppet.writers[0].close()
        for done in range(1, count + 1):
            await puppet.until(lambda: len(puppet.asked) == 2 and len(puppet.asked[1]) >= done)  # noqa: B023
            puppet.writers[1].write(b"$%d\r\n%s\r\n" % (len(puppet.asked[1][done - 1]), puppet.asked[1][done - 1]))
    assert [task.result() for task in asked] == [f"{number}".encode() for number in range(count)]


async def test_an_answer_that_arrives_in_pieces_is_one(asking):
    link, puppet = asking()
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(link.ask("ECHO", "x"))
        await puppet.until(lambda: puppet.asked == [[b"x"]])
        for piece in (b"*2\r\n$3\r", b"\nab", b"c\r\n:", b"7\r\n"):
            puppet.writers[0].write(piece)
            await puppet.writers[0].drain()
            await asyncio.sleep(0.002)
    assert asked.result() == [b"abc", 7]


@pytest.fixture
def certified(tmp_path) -> Path:
    """Return a folder with a certificate for localhost and its key."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", "key.pem", "-out", "ca.pem"],
        cwd=tmp_path, check=True, capture_output=True, timeout=20,
    )  # fmt: skip
    return tmp_path


async def test_a_long_answer_over_tls_arrives_whole(certified):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certified / "ca.pem", certified / "key.pem")
    puppet = Puppet()
    server = await asyncio.start_server(puppet.serve, "127.0.0.1", 0, ssl=context)
    client = connect(f"rediss://localhost:{server.sockets[0].getsockname()[1]}/0?ssl_ca_certs={certified / 'ca.pem'}")
    link = PipelinedConnection(client)
    value = b"".join(number.to_bytes(4, "little") for number in range(1 << 18))
    try:
        async with asyncio.TaskGroup() as tasks:
            answer = tasks.create_task(link.ask("GET", "long"))
            await puppet.until(lambda: bool(puppet.asked))
            puppet.writers[0].write(b"$%d\r\n%s\r\n" % (len(value), value))
        assert answer.result() == value, "many records of 16 kB, several at each read"
    finally:
        await link.aclose()
        await client.aclose()
        for writer in puppet.writers:
            writer.close()
        server.close()
        await server.wait_closed()


async def test_a_server_that_falls_silent_is_given_up_and_asked_again_elsewhere(asking):
    link, puppet = asking(timeout_s=0.05)
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(together([link.ask("ECHO", name) for name in "ab"]))
        await puppet.until(lambda: len(puppet.asked) == 2 and len(puppet.asked[1]) == 2)
        puppet.writers[1].write(b"+a\r\n+b\r\n")
    assert asked.result() == [b"a", b"b"]
    assert puppet.asked == [[b"a", b"b"]] * 2


async def test_a_server_that_stays_silent_is_said_to_be_late(asking):
    link, puppet = asking(patience_s=0.05)
    (answer,) = await together([link.ask("ECHO", "a")])
    assert isinstance(answer, exceptions.TimeoutError)
    assert "no answer" in str(answer)
    assert puppet.asked == [[b"a"]]


async def test_a_server_that_goes_on_answering_is_not_late(asking):
    # each answer may be 1.6 s late on a busy machine; together they take longer than the limit
    link, puppet = asking(timeout_s=2.0)
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(together([link.ask("ECHO", name) for name in "abcdef"]))
        await puppet.until(lambda: puppet.asked == [[b"a", b"b", b"c", b"d", b"e", b"f"]])
        for name in (b"a", b"b", b"c", b"d", b"e", b"f"):
            await asyncio.sleep(0.4)
            puppet.writers[0].write(b"+%s\r\n" % name)
    assert asked.result() == [b"a", b"b", b"c", b"d", b"e", b"f"]


@pytest.mark.parametrize(
    "reply",
    [
        pytest.param(b"HTTP/1.1 400 Bad Request\r\n", id="what is no answer at all"),
        pytest.param(
            b"-READONLY You can't write against a read only replica.\r\n", id="a master that is a replica now"
        ),
    ],
)
async def test_a_server_that_cannot_be_the_right_one_is_left_for_whoever_is(asking, reply):
    link, puppet = asking()
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(link.ask("ECHO", "x"))
        await puppet.until(lambda: puppet.asked == [[b"x"]])
        puppet.writers[0].write(reply)
        await puppet.until(lambda: puppet.asked == [[b"x"], [b"x"]])
        puppet.writers[1].write(b"+x\r\n")
    assert asked.result() == b"x"


async def test_an_answer_that_nobody_asked_for_ends_the_connection(asking):
    link, puppet = asking()
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(link.ask("ECHO", "x"))
        await puppet.until(lambda: puppet.asked == [[b"x"]])
        puppet.writers[0].write(b"+x\r\n+y\r\n")
        assert await first == b"x"
        second = tasks.create_task(link.ask("ECHO", "z"))
        await puppet.until(lambda: puppet.asked == [[b"x"], [b"z"]])
        puppet.writers[1].write(b"+z\r\n")
    assert second.result() == b"z"


async def test_a_push_message_is_nobodys_answer(asking):
    link, puppet = asking()
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(link.ask("ECHO", "x"))
        await puppet.until(lambda: puppet.asked == [[b"x"]])
        puppet.writers[0].write(b">2\r\n+invalidate\r\n*1\r\n+key\r\n+x\r\n")
    assert asked.result() == b"x"


async def test_whoever_connects_and_is_cancelled_leaves_the_connecting_to_the_others(asking):
    link, puppet = asking()
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(link.ask("ECHO", "given up"))
        others = [tasks.create_task(link.ask("ECHO", name)) for name in "ab"]
        # the first connects for all
        await asyncio.sleep(0)
        first.cancel()
        await puppet.until(lambda: puppet.asked == [[b"a", b"b"]])
        puppet.writers[0].write(b"+a\r\n+b\r\n")
    assert first.cancelled()
    assert [task.result() for task in others] == [b"a", b"b"]
