"""The `nccl` transport as far as it goes without a GPU: NCCL itself is replaced, which here would not load."""

import base64
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rlhf_runtime.errors import ConnectionLostError, WeightSyncError
from rlhf_runtime.weight_sync.client import EngineClient, background
from rlhf_runtime.weight_sync.meeting import Meeting
from rlhf_runtime.weight_sync.source import RecordingSource

nccl = pytest.importorskip("rlhf_runtime.weight_sync.nccl", reason="needs vLLM")
UNIQUE_ID = bytes(range(128))
HOST = "127.0.0.1"
WORKERS = 2


class Group:
    """A communicator whose broadcasts hang until it is aborted, as NCCL's do when a peer is gone.

    It is taken apart while `freeing` is not set, and is broken for who uses it, or aborts it again, from then on.
    """

    def __init__(self) -> None:
        self.disabled = False
        self.device = torch.device("cpu", 0)
        self.comm = object()
        self.nccl = SimpleNamespace(ncclCommAbort=self._abort)
        self.aborted, self.freeing = threading.Event(), threading.Event()
        self.freeing.set()
        self.misused: list[str] = []

    def _abort(self, comm: object) -> None:
        if self.aborted.is_set():
            self.misused.append("aborted twice")
        if not self.disabled:
            self.misused.append("open to use while it was aborted")
        self.aborted.set()
        self.freeing.wait(20)

    def broadcast(self, fails: bool = False) -> None:
        if self.disabled:
            return
        if self.aborted.is_set():
            self.misused.append("used after it was aborted")
        self.aborted.wait(20)
        if fails:
            raise RuntimeError("NCCL error: unhandled system error")


class Engine:
    """An actor handle whose steps are answered as told: by None, an error, a function, as another leaves, or never."""

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
        elif callable(answer):
            future = background(answer)
        elif answer == "stays":
            future = background(self._stay)
        elif answer != "never":
            if step == "init_weight_transfer_engine":
                self.joined = [background(lambda: self._join(info)) for _ in range(WORKERS)]
            future.set_result(None)
        return SimpleNamespace(future=lambda: future)

    def _join(self, info: Any) -> Meeting:
        meeting = Meeting.find(info["host"], info["port"], info["world_size"], 30.0)
        meeting.join(lambda store: None)
        return meeting

    def _stay(self) -> None:
        """Receive until another process leaves."""
        meeting = self.joined[0].result()
        while True:
            meeting.require_everyone()


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    made = Group()
    monkeypatch.setattr(nccl, "NCCLLibrary", lambda: SimpleNamespace(ncclGetUniqueId=lambda: UNIQUE_ID))
    monkeypatch.setattr(nccl, "uid_init_process_group", lambda *arguments: made)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "device_index", lambda index: nullcontext())
    return made


@pytest.fixture
def connect(group: Group) -> Callable[..., Any]:
    def made(*engines: Engine, rank: int = 0, timeout_seconds: float = 30.0) -> Any:
        client = EngineClient(engines, WORKERS, True, timeout_seconds)
        source = RecordingSource(torch.nn.Linear(3, 2), "", torch.bfloat16, checksums=True)
        info = nccl.NCCLSenderInitInfo(4096, HOST, rank=rank)
        return nccl.NCCLSender.trainer_init(info, client=client, source=source)

    return made


def packs(monkeypatch: pytest.MonkeyPatch, move: Callable[[Iterator[tuple[str, torch.Tensor]], Group], None]) -> None:
    def producer(iterator: Any, group: Group, **_: Any) -> None:
        move(iterator, group)

    monkeypatch.setattr("vllm.distributed.weight_transfer.nccl_engine.packed_nccl_broadcast_producer", producer)


def test_engines_meet_where_they_are_told_with_ranks_one_after_another(connect: Callable[..., Any]) -> None:
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
    for joined in itertools.chain(*(engine.joined for engine in engines)):
        joined.result()


def test_nobody_enters_nccl_where_an_engine_cannot_join(
    connect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[Any] = []
    monkeypatch.setattr(nccl, "uid_init_process_group", lambda *arguments: entered.append(arguments))
    fine = Engine()
    with pytest.raises(WeightSyncError, match="no such device"):
        connect(fine, Engine(init_weight_transfer_engine=WeightSyncError("no such device")))
    assert all(isinstance(joined.exception(timeout=10), ConnectionLostError) for joined in fine.joined)
    assert not entered


def test_a_send_lists_the_tensors_and_broadcasts_them(
    connect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    packs(monkeypatch, lambda weights, group: sent.extend(name for name, _ in weights))
    engine = Engine()
    connect(engine).send_weights()
    update = engine.asked["update_weights"]
    assert sent == update["names"] == ["weight", "bias"]
    assert (update["shapes"], update["dtype_names"]) == ([[2, 3], [2]], ["bfloat16", "bfloat16"])
    assert "finish_weight_update" in engine.asked


@pytest.mark.parametrize(
    ("answer", "told"), [(WeightSyncError("out of memory"), "out of memory"), ("never", "got no answer")]
)
def test_an_engine_that_fails_or_is_late_aborts_a_broadcast_that_hangs(
    connect: Callable[..., Any], group: Group, monkeypatch: pytest.MonkeyPatch, answer: Any, told: str
) -> None:
    packs(monkeypatch, lambda weights, group: (group.broadcast(), group.broadcast()))
    sender = connect(Engine(), Engine(update_weights=answer), timeout_seconds=1.0)
    with pytest.raises(WeightSyncError, match=told):
        sender.send_weights()
    assert group.aborted.wait(10)
    assert not group.misused


def test_a_broadcast_that_fails_while_the_group_is_freed_tells_why_it_was(
    connect: Callable[..., Any], group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    packs(monkeypatch, lambda weights, group: group.broadcast(fails=True))
    group.freeing.clear()
    sender = connect(Engine(update_weights="never"), timeout_seconds=0.5)
    with pytest.raises(WeightSyncError, match="got no answer to update_weights"):
        sender.send_weights()
    sender.shutdown()
    group.freeing.set()
    assert not group.misused


def test_an_engine_that_says_late_why_it_failed_is_still_heard(
    connect: Callable[..., Any], group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL itself may notice before the engine's answer is here."""

    said = Future[None]()

    def broken(weights: Any, group: Group) -> None:
        threading.Timer(0.3, said.set_exception, [WeightSyncError("out of memory")]).start()
        raise RuntimeError("NCCL error: remote process exited")

    packs(monkeypatch, broken)
    with pytest.raises(WeightSyncError, match="out of memory"):
        connect(Engine(update_weights=said.result)).send_weights()


def test_a_sender_that_fails_by_itself_tells_the_engines_and_its_own_reason(
    connect: Callable[..., Any], group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(weights: Any, group: Group) -> None:
        raise RuntimeError("the memory is gone")

    packs(monkeypatch, fail)
    sender = connect(Engine(update_weights="stays"))
    with pytest.raises(RuntimeError, match="the memory is gone"):
        sender.send_weights()
    assert group.aborted.wait(10)


@pytest.fixture
def receiver(group: Group) -> Any:
    """An engine's worker, joined to a sender that is `receiver.sender`."""
    sender = Meeting.open(HOST, 2, 30.0)
    parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    config = SimpleNamespace(parallel_config=parallel, model_config=None)
    made = nccl.WatchedNCCLWeightTransferEngine(None, config, torch.device("cpu"), SimpleNamespace(load_weights=None))
    made.timeout_seconds, made.sender = 30.0, sender
    here = background(lambda: sender.join(lambda store: None))
    unique_id = base64.b64encode(UNIQUE_ID).decode()
    made.init_transfer_engine(
        nccl.NCCLMeetingInfo(
            host=HOST, port=sender.port, rank_offset=1, world_size=2, nccl_unique_id_b64=unique_id, packed=True
        )
    )
    here.result()
    return made


def receives(monkeypatch: pytest.MonkeyPatch, move: Callable[[Group], None]) -> Any:
    def consumer(iterator: Any, group: Group, **_: Any) -> None:
        move(group)

    monkeypatch.setattr("vllm.distributed.weight_transfer.nccl_engine.packed_nccl_broadcast_consumer", consumer)
    return nccl.NCCLWeightTransferUpdateInfo(names=["weight"], dtype_names=["bfloat16"], shapes=[[2, 3]])


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("why", ["a process left", "no end of the weights within 0.5 s"])
def test_a_worker_leaves_an_update_that_cannot_end(
    receiver: Any, group: Group, monkeypatch: pytest.MonkeyPatch, why: str, fails: bool
) -> None:
    info = receives(monkeypatch, lambda group: (group.broadcast(fails), group.broadcast()))
    if "left" in why:
        receiver.sender.leave()
    else:
        receiver.timeout_seconds = 0.5
    with pytest.raises(ConnectionLostError, match=why):
        receiver.receive_weights(info)
    receiver.shutdown()
    assert group.aborted.wait(10)
    assert not group.misused
    with pytest.raises(ConnectionLostError):
        receiver.sender.require_everyone()


def test_a_worker_that_fails_by_itself_tells_its_own_reason(
    receiver: Any, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(group: Group) -> None:
        raise ValueError("no such layer")

    with pytest.raises(ValueError, match="no such layer"):
        receiver.receive_weights(receives(monkeypatch, fail))
    receiver.sender.require_everyone()
    receiver.receive_weights(receives(monkeypatch, lambda group: None))


def test_other_ranks_gather_and_send_nothing(connect: Callable[..., Any]) -> None:
    engine = Engine()
    sender = connect(engine, rank=1)
    sender.send_weights()
    assert list(sender.source.checksums) == ["weight", "bias"]
    assert not engine.asked
