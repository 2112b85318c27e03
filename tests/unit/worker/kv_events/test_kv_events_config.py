"""The flags of KV events: addresses, topics, several workers, and packages that are missing."""

import argparse

import pytest

from baton.common.errors import ConfigurationError
from engine.config import EngineConfig
from worker.decode import add_args as add_decode_args
from worker.decode import main as decode_main
from worker.kv_events import config as kv_events_config
from worker.kv_events.config import KvEventsConfig, listens_at


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (
            {"kv_events_replay": "tcp://*:1"},
            "--kv-events-replay is set, and --kv-events-zmq is not",
        ),
        ({"kv_events_topic": "t"}, "--kv-events-topic is set, and --kv-events-zmq is not"),
        ({"kv_events_rank": 1}, "--kv-events-rank is set, and --kv-events-zmq is not"),
        (
            {"kv_events_zmq": "tcp://*:1", "kv_events_rank": -1},
            "--kv-events-rank is -1; it must be from 0 to 65535",
        ),
        *(
            ({"kv_events_zmq": address}, f"--kv-events-zmq is '{address}'; it must be tcp://HOST")
            for address in (
                *("", "5557", "*:5557", "tcp://", "tcp://*", "tcp://*:0", "tcp://*:65536"),
                *(
                    "tcp://:5557",
                    "tcp://*:x",
                    "udp://*:5557",
                    "inproc://x",
                    "ipc://",
                    "tcp://a/b:1",
                ),
            )
        ),
        (
            {"kv_events_zmq": "tcp://*:1", "kv_events_replay": "tcp://*"},
            "--kv-events-replay is 'tcp://*'; it must be",
        ),
        (
            {"kv_events_zmq": "tcp://*:1", "kv_events_topic": "t" * 1025},
            "--kv-events-topic has 1025 bytes; at most 1024",
        ),
    ],
)
def test_bad_flags_are_refused_by_name(fields, problem):
    with pytest.raises(ConfigurationError) as caught:
        KvEventsConfig(**fields)
    assert problem in caught.value.message


@pytest.mark.parametrize("module", ["zmq", "msgspec"])
def test_a_missing_package_is_named_with_its_extra(module, monkeypatch):
    find = kv_events_config.find_spec
    monkeypatch.setattr(
        kv_events_config, "find_spec", lambda name: None if name == module else find(name)
    )
    assert KvEventsConfig() == KvEventsConfig(kv_events_zmq=None)
    with pytest.raises(ConfigurationError, match=rf"{module}, which is not .*'baton-llm\[zmq\]'"):
        KvEventsConfig(kv_events_zmq="tcp://*:5557")


def test_an_engine_without_a_prefix_cache_has_nothing_to_publish():
    engine = EngineConfig(model="m", enable_prefix_caching=False)
    KvEventsConfig().check_engine(engine)
    with pytest.raises(ConfigurationError, match=r"--kv-events-zmq .* --no-enable-prefix"):
        KvEventsConfig(kv_events_zmq="tcp://*:5557").check_engine(engine)


@pytest.mark.parametrize(
    ("address", "listens"),
    [
        ("tcp://*:5557", True),
        ("tcp://0.0.0.0:5557", True),
        ("tcp://[::]:5557", True),
        ("ipc:///run/events", True),
        ("tcp://127.0.0.1:5557", False),
        ("tcp://[::1]:5557", False),
        ("tcp://picker.llm.svc:5557", False),
    ],
)
def test_addresses_are_listened_at_as_in_vllm(address, listens):
    KvEventsConfig(kv_events_zmq=address)
    assert listens_at(address) == listens


def test_the_topic_names_the_pod_and_the_model(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "pod-7")
    config = KvEventsConfig(kv_events_zmq="tcp://*:5557")
    assert config.topic("org/model") == "kv@pod-7@org/model"
    config = KvEventsConfig(kv_events_zmq="tcp://*:5557", kv_events_topic="")
    assert config.topic("org/model") == ""


def test_several_workers_have_addresses_of_their_own():
    config = KvEventsConfig(kv_events_zmq="tcp://*:5557", kv_events_replay="ipc:///run/replay")
    assert config.of_replica(0) == config
    assert config.of_replica(3) == KvEventsConfig(
        kv_events_zmq="tcp://*:5560", kv_events_replay="ipc:///run/replay.3", kv_events_rank=3
    )
    with pytest.raises(ConfigurationError, match="--kv-events-zmq is 'tcp://\\*:65537'"):
        KvEventsConfig(kv_events_zmq="tcp://*:65535").of_replica(2)
    assert KvEventsConfig().of_replica(3) == KvEventsConfig()


def test_no_worker_gets_a_port_of_another_one():
    """Worker 2 would publish where worker 0 answers, or answer where it publishes."""
    for live, replay in ((5557, 5559), (5559, 5557)):
        config = KvEventsConfig(
            kv_events_zmq=f"tcp://*:{live}", kv_events_replay=f"tcp://127.0.0.1:{replay}"
        )
        assert config.of_replica(1).kv_events_replay == f"tcp://127.0.0.1:{replay + 1}"
        with pytest.raises(ConfigurationError, match=f"{replay} and --kv-events-zmq .*worker 2"):
            config.of_replica(2)
    with pytest.raises(ConfigurationError, match="worker 0"):
        KvEventsConfig(kv_events_zmq="tcp://*:1", kv_events_replay="tcp://*:1").of_replica(0)
    for live in ("tcp://picker:5557", "ipc:///run/events"):  # no ports of this machine
        config = KvEventsConfig(kv_events_zmq=live, kv_events_replay="tcp://*:5558")
        assert config.of_replica(200).kv_events_replay == "tcp://*:5758"


def test_an_address_in_use_ends_a_worker_before_it_loads_a_model(monkeypatch, capfd):
    monkeypatch.setattr("rpc.server.start_logging", lambda *_: None)
    parser = argparse.ArgumentParser()
    add_decode_args(parser)
    flags = ("--port=0", "--kv-events-zmq=ipc:///nowhere/at/all")
    assert decode_main(parser.parse_args(("no-such-model", *flags))) == 2
    assert "--kv-events-zmq ipc:///nowhere/at/all cannot be opened" in capfd.readouterr().err
