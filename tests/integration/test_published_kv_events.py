"""KV events over ZMQ: a subscriber knows exactly what real engines cache, whatever it missed."""

import asyncio
from collections.abc import Callable
from contextlib import closing
from itertools import count

import grpc
import msgspec
import pytest
import zmq

from baton.common.errors import ConfigurationError
from baton.v1 import worker_pb2, worker_pb2_grpc
from engine.kv_cache.spec import spec_of
from tests.support.checkpoints import prompt_of, tiny_checkpoint
from tests.support.cluster import WORKER_CALL, ServerProcess
from tests.support.kv_event_reader import END, KvEventReader
from tests.support.ports import reserved_ports
from tests.support.running_router import request, token_ids_of
from tests.support.tier_calls import decode_at, prefill_at
from tests.support.tiers_here import running_tiers
from worker.kv_events import publisher
from worker.kv_events.config import KvEventsConfig
from worker.kv_events.sockets import KvEventSockets

BLOCK = 16
PROMPT = prompt_of(100, seed=1)


def config_of(ports, **fields):
    live, replay = (f"tcp://127.0.0.1:{port}" for port in ports)
    return KvEventsConfig(
        kv_events_zmq=live.replace("127.0.0.1", "*"), kv_events_replay=replay, **fields
    )


def reader_of(ports):
    return KvEventReader(*(f"tcp://127.0.0.1:{port}" for port in ports))


async def generate(router, tokens, num_tokens=40):
    return token_ids_of(
        await router.generate(request(tokens, max_tokens=num_tokens, ignore_eos=True))
    )


async def cached_keys(engine, layer_group=0):
    """The keys in an engine's index, in no order."""
    future: asyncio.Future = asyncio.get_running_loop().create_future()
    engine._thread.ask(future.set_result, lambda s: s.kv.pool.cached_keys(layer_group))
    return set(await future)


async def follow(reader, engine, more: Callable[[], object] = lambda: True):
    """Reads until the events say what the engine's index says."""
    async with asyncio.timeout(30):
        while True:
            await asyncio.to_thread(reader.catch_up)
            if set(reader.cached.blocks) == await cached_keys(engine) and more():
                return


def tokens_of(reader, tokens):
    """How many blocks of a sequence the events name, with its tokens and in its order."""
    parent, num_blocks = None, 0
    while True:
        named = tuple(tokens[num_blocks * BLOCK : (num_blocks + 1) * BLOCK])
        follower = [
            key
            for key, b in reader.cached.blocks.items()
            if (b.parent, b.token_ids) == (parent, named)
        ]
        if not follower:
            return num_blocks
        ((parent,), num_blocks) = follower, num_blocks + 1


async def test_subscribers_know_what_both_tiers_cache(tmp_path):
    """Blocks that decode loads ahead of a request, answers, evictions and resets included."""
    ports = {"prefill": reserved_ports(2), "decode": reserved_ports(2)}
    events = {role: config_of(ports[role]) for role in ports}
    async with running_tiers(tmp_path, *ports, kv_events=events) as router:
        with reader_of(ports["prefill"]) as prefill, reader_of(ports["decode"]) as decode:
            engines = [worker.engine for worker in router.workers]
            whole = [*PROMPT, *await generate(router, PROMPT)]
            await follow(prefill, engines[0])
            await follow(decode, engines[1])
            assert tokens_of(prefill, whole) == len(PROMPT) // BLOCK
            assert tokens_of(decode, whole) == (len(whole) - 1) // BLOCK
            for seed in range(2, 14):  # more than the pools of 64 blocks hold
                await generate(router, prompt_of(100, seed=seed))
            await follow(prefill, engines[0])
            await follow(decode, engines[1])
            assert tokens_of(decode, whole) == 0
            await engines[1].reset_prefix_cache()
            await follow(decode, engines[1], lambda: not decode.cached.blocks)


async def test_what_a_subscriber_missed_is_repeated(tmp_path, monkeypatch):
    """Also after the publisher has dropped its old messages, and began again with all blocks."""
    monkeypatch.setattr(publisher, "_MIN_KEPT_KEYS", 0)
    ports = reserved_ports(2)
    events = {"decode": config_of(ports)}
    async with running_tiers(tmp_path, "decode", prefill=(), kv_events=events) as router:
        engine = router.workers[0].engine
        with reader_of(ports) as reader:
            await generate(router, PROMPT)
            await asyncio.to_thread(
                reader.read_until, lambda: len(reader.cached.blocks) == 139 // BLOCK
            )
            reader.socket.disconnect(f"tcp://127.0.0.1:{ports[0]}")
            for seed in range(2, 24):
                await generate(router, prompt_of(100, seed=seed), num_tokens=1)
            reader.socket.connect(f"tcp://127.0.0.1:{ports[0]}")
            expected = await cached_keys(engine)
            await asyncio.to_thread(
                reader.read_until, lambda: set(reader.cached.blocks) == expected
            )
            kept = await asyncio.to_thread(reader.replay, 0)
            assert kept[0][1] > 0, "old messages were kept"
            assert {topic for topic, *_ in kept} == {b"kv@here@tiny"}
        with reader_of(ports) as late:
            await asyncio.to_thread(late.catch_up)
            assert set(late.cached.blocks) == expected


@pytest.mark.parametrize("variant", ["gemma3", "lfm2"])
async def test_windows_and_states_are_groups_of_their_own(tmp_path, variant):
    ports = reserved_ports(2)
    events = {"decode": config_of(ports)}
    async with running_tiers(
        tmp_path, "decode", prefill=(), variant=variant, kv_events=events
    ) as router:
        engine = router.workers[0].engine
        with reader_of(ports) as reader:
            for seed in range(6):
                await generate(router, prompt_of(100, seed=seed))
            await follow(reader, engine)
            num_groups = spec_of(engine.config, engine.info).num_layer_groups
            assert num_groups > 1
            for group in range(num_groups):
                blocks = reader.cached.groups.get(group, {})
                assert set(blocks) == await cached_keys(engine, group) != set()


async def test_subscribers_that_read_nothing_or_ask_nonsense_hold_nothing_up(tmp_path):
    ports = reserved_ports(2)
    events = {"decode": config_of(ports)}
    with zmq.Context() as context:
        mute = [context.socket(zmq.DEALER) for _ in range(12)]
        idle = context.socket(zmq.SUB)
        for socket in (*mute, idle):
            socket.linger = 0
        async with running_tiers(tmp_path, "decode", prefill=(), kv_events=events) as router:
            idle.rcvhwm = 1
            idle.subscribe("")
            idle.connect(f"tcp://127.0.0.1:{ports[0]}")
            for socket in mute:
                socket.rcvhwm = 1
                socket.connect(f"tcp://127.0.0.1:{ports[1]}")
                for frames in ([b""], [b"", b"short"], [b"", b"x" * 5000], [b"", bytes(8)] * 3):
                    socket.send_multipart(frames)
                socket.send_multipart([b"", bytes(8)])
            answers = [await generate(router, PROMPT) for _ in range(3)]
            assert answers[0] == answers[2]
            with reader_of(ports) as reader:
                await follow(reader, router.workers[0].engine)
                assert tokens_of(reader, [*PROMPT, *answers[0]]) == 139 // BLOCK
        for socket in (*mute, idle):
            socket.close()


class FakeSockets:
    """Sockets whose clients have room or never have any, by their names."""

    answers_requests = True

    def __init__(self):
        self.published, self.answers = [], []
        self.requests: asyncio.Queue = asyncio.Queue()

    async def publish(self, frames):
        self.published.append(frames)

    async def next_request(self):
        return await self.requests.get()

    async def answer(self, frames):
        if frames[0] == b"left":
            raise ConnectionError("the client has left")
        if frames[0] == b"mute":
            return False
        self.answers.append(frames)
        return True

    def close(self):
        pass


async def test_clients_that_take_no_answer_are_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(publisher, "_ANSWER_TIMEOUT_S", 0.1)
    async with running_tiers(tmp_path, "decode", prefill=()) as router:
        sockets = FakeSockets()
        published = publisher.KvEventPublisher(sockets, router.workers[0].engine, "topic", 2)
        async with asyncio.timeout(30):
            for name in [b"left", *[b"mute"] * 3] * publisher._MAX_ANSWERS:
                sockets.requests.put_nowait([name, b"", bytes(8)])
            await generate(router, PROMPT)
            names = (b"client %d" % number for number in count())
            while not (ends := [frames for frames in sockets.answers if frames[3] == END]):
                sockets.requests.put_nowait([next(names), b"", bytes(8)])
                await asyncio.sleep(0.02)
            assert len(published._answers) <= publisher._MAX_ANSWERS
        client = ends[0][0]
        *answers, end = [frames for frames in sockets.answers if frames[0] == client]
        assert end == (client, b"", b"", END, b"")
        numbers = [int.from_bytes(number, "big") for _, _, _, number, _ in answers]
        assert numbers == list(range(len(numbers))) != []
        assert {frames[0] for frames in sockets.published} == {b"topic"}
        batches = [msgspec.msgpack.decode(payload) for *_, payload in sockets.published]
        assert {rank for *_, rank in batches} == {2}
        await published.close()


async def reported_keys(server):
    """What a worker reports to Baton's routers that it caches."""
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        events = stub.WatchKvEvents(
            worker_pb2.WatchKvEventsRequest(), timeout=30, metadata=WORKER_CALL
        )
        load = await stub.GetLoad(worker_pb2.GetLoadRequest(), timeout=30, metadata=WORKER_CALL)
        keys: set[bytes] = set()
        async for response in events:  # the first ones are the whole content
            keys.update(key for event in response.events for key in event.stored.keys)
            if len(keys) >= load.load.num_cached_blocks:
                break
        return keys


@pytest.mark.slow
async def test_processes_publish_what_they_report_to_routers(tmp_path):
    """Blocks of handoffs and answers; a worker that is killed begins again at the first number."""
    ports = reserved_ports(2)
    flags = [
        *(
            str(tiny_checkpoint("llama")),
            "--dtype=float32",
            "--max-model-len=256",
            "--num-threads=1",
        ),
        *("--num-gpu-blocks-override=64", f"--kv-connector=file://{tmp_path}/kv"),
        *("--served-model-name=tiny", "--enforce-eager"),
    ]
    server = ServerProcess(
        "worker.decode",
        tmp_path,
        "decode",
        [*flags, f"--kv-events-zmq=tcp://*:{ports[0]}", f"--kv-events-replay=tcp://*:{ports[1]}"],
    )
    prefill = ServerProcess("worker.prefill", tmp_path, "prefill", flags)
    try:
        await server.wait_serving()
        await prefill.wait_serving()
        with reader_of(ports) as reader:
            for number in range(3):
                prompt = prompt_of(100, seed=number)
                whole = await decode_at(server, await prefill_at(prefill, f"r{number}", prompt, 40))
                await asyncio.to_thread(
                    reader.read_until,
                    lambda whole=[*prompt, *whole]: tokens_of(reader, whole) == 139 // BLOCK,
                )
            assert set(reader.cached.blocks) == await reported_keys(server)
            old = reader.next_number
            server.kill()
            await server.restart()
            async with asyncio.timeout(30):
                answer = await asyncio.to_thread(reader.replay, 0)
                while not answer:  # it serves before it has published anything
                    answer = await asyncio.to_thread(reader.replay, 0)
            assert [number for _, number, _ in answer] == [0] != old
            assert {topic.rpartition(b"@")[2] for topic, *_ in answer} == {b"tiny"}
            assert server.stop() == 0
    finally:
        for process in (server, prefill):
            process.kill()


async def test_a_subscriber_that_listens_is_connected_to():
    (port,) = reserved_ports(1)
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.bind(f"tcp://*:{port}")
        subscriber.subscribe("kv@")
        sockets = KvEventSockets(KvEventsConfig(kv_events_zmq=f"tcp://127.0.0.1:{port}"))
        async with asyncio.timeout(30):
            while not await asyncio.to_thread(subscriber.poll, 20):
                await sockets.publish((b"kv@pod@m", bytes(8), b"payload"))
        assert subscriber.recv_multipart() == [b"kv@pod@m", bytes(8), b"payload"]
        sockets.close()


@pytest.mark.parametrize(("kind", "flag"), [(zmq.XSUB, 0), (zmq.DEALER, 1)])
async def test_a_large_frame_ends_its_connection(kind, flag):
    """Of a subscriber, or of a reader that asks for messages; libzmq would keep it."""
    ports = reserved_ports(2)
    sockets = closing(KvEventSockets(config_of(ports)))
    with sockets, zmq.Context() as context, context.socket(kind) as client:
        client.linger = 0
        with client.get_monitor_socket(zmq.EVENT_DISCONNECTED) as events:
            client.connect(f"tcp://127.0.0.1:{ports[flag]}")
            client.send(b"\1" * 2049)  # 1 subscribes
            assert await asyncio.to_thread(events.poll, 30_000)
            client.disable_monitor()


async def test_addresses_that_cannot_be_opened_are_refused_by_flag():
    (port,) = reserved_ports(1)
    with zmq.Context() as context, context.socket(zmq.REP) as other:
        other.bind(f"tcp://127.0.0.1:{port}")
        address = f"tcp://127.0.0.1:{port}"
        for fields, named in (
            ({"kv_events_zmq": f"tcp://*:{port}"}, rf"--kv-events-zmq tcp://\*:{port} .*in use"),
            (
                {"kv_events_zmq": "tcp://127.0.0.1:1", "kv_events_replay": address},
                rf"--kv-events-replay {address} .*in use",
            ),
            ({"kv_events_zmq": "tcp://no host:1"}, "--kv-events-zmq is 'tcp://no host:1'"),
            ({"kv_events_zmq": "ipc:///nowhere/at/all"}, "--kv-events-zmq ipc:///nowhere"),
        ):
            with pytest.raises(ConfigurationError, match=named):
                KvEventSockets(KvEventsConfig(**fields))
