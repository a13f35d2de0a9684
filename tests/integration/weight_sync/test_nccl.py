"""The `nccl` transport as far as it goes without a GPU: NCCL itself is replaced, which here would not load."""

import base64
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rlhf_runtime.errors import WeightSyncError
from rlhf_runtime.weight_sync.client import EngineClient
from rlhf_runtime.weight_sync.source import RecordingSource

nccl = pytest.importorskip("rlhf_runtime.weight_sync.nccl", reason="needs vLLM")
UNIQUE_ID = bytes(range(128))


class Group:
    """A communicator whose broadcasts hang until it is aborted, as NCCL's do when a peer is gone."""

    def __init__(self) -> None:
        self.aborted = threading.Event()
        self.sent: list[int] = []

    def destroy(self) -> None:
        self.aborted.set()


class Engine:
    """An actor handle whose steps are answered as told: by None, an error, or never."""

    def __init__(self, **answers: Any) -> None:
        self.asked: dict[str, Any] = {}
        self._answers = answers
        self.transfer_weights = SimpleNamespace(remote=self._call)

    def _call(self, step: str, info: Any) -> Any:
        self.asked[step] = info
        future: Future[None] = Future()
        answer = self._answers.get(step)
        if isinstance(answer, Exception):
            future.set_exception(answer)
        elif answer != "never":
            future.set_result(None)
        return SimpleNamespace(future=lambda: future)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    made = Group()
    monkeypatch.setattr(nccl, "NCCLLibrary", lambda: SimpleNamespace(ncclGetUniqueId=lambda: UNIQUE_ID))
    monkeypatch.setattr(nccl, "uid_init_process_group", lambda *arguments: made)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    return made


@pytest.fixture
def connect(group: Group) -> Callable[..., Any]:
    def made(*engines: Engine, rank: int = 0, timeout_seconds: float = 30.0) -> Any:
        client = EngineClient(engines, 2, True, timeout_seconds)
        source = RecordingSource(torch.nn.Linear(3, 2))
        return nccl.NCCLSender.trainer_init(nccl.NCCLSenderInitInfo(4096, rank=rank), client=client, source=source)

    return made


def packs(monkeypatch: pytest.MonkeyPatch, move: Callable[[Iterator[tuple[str, torch.Tensor]], Group], None]) -> None:
    def producer(iterator: Any, group: Group, **_: Any) -> None:
        move(iterator, group)

    monkeypatch.setattr("vllm.distributed.weight_transfer.nccl_engine.packed_nccl_broadcast_producer", producer)


def test_engines_meet_by_an_id_and_no_port_with_ranks_one_after_another(connect: Callable[..., Any]) -> None:
    engines = [Engine(), Engine()]
    connect(*engines)
    infos = [engine.asked["init_weight_transfer_engine"] for engine in engines]
    assert [info["rank_offset"] for info in infos] == [1, 3]
    for info in infos:
        assert base64.b64decode(info["nccl_unique_id_b64"]) == UNIQUE_ID
        assert info["world_size"] == 5
        assert info["packed"]
        assert info["packed_buffer_size_bytes"] == 2048
        assert not {"master_address", "master_port"} & set(info)


def test_an_engine_that_cannot_join_is_told_while_nccl_still_waits_for_it(
    connect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = threading.Event()
    monkeypatch.setattr(nccl, "uid_init_process_group", lambda *arguments: waiting.wait())
    with pytest.raises(WeightSyncError, match="no such device"):
        connect(Engine(), Engine(init_weight_transfer_engine=WeightSyncError("no such device")))
    waiting.set()


def test_a_send_lists_the_tensors_and_broadcasts_them(
    connect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    packs(monkeypatch, lambda weights, group: sent.extend(name for name, _ in weights))
    engine = Engine()
    connect(engine).send_weights()
    update = engine.asked["update_weights"]
    assert sent == update["names"] == ["weight", "bias"]
    assert (update["shapes"], update["dtype_names"]) == ([[2, 3], [2]], ["float32", "float32"])
    assert "finish_weight_update" in engine.asked


@pytest.mark.parametrize(
    ("answer", "told"), [(WeightSyncError("out of memory"), "out of memory"), ("never", "got no answer")]
)
def test_an_engine_that_fails_or_is_late_aborts_a_broadcast_that_hangs(
    connect: Callable[..., Any], group: Group, monkeypatch: pytest.MonkeyPatch, answer: Any, told: str
) -> None:
    packs(monkeypatch, lambda weights, group: group.aborted.wait())
    sender = connect(Engine(), Engine(update_weights=answer), timeout_seconds=1.0)
    with pytest.raises(WeightSyncError, match=told):
        sender.send_weights()
    assert group.aborted.is_set()


def test_other_ranks_gather_and_send_nothing(connect: Callable[..., Any]) -> None:
    engine = Engine()
    sender = connect(engine, rank=1)
    sender.send_weights()
    assert list(sender.source.checksums) == ["weight", "bias"]
    assert not engine.asked
