"""How fast new weights reach a real vLLM engine in another process, beside what limits each way.

    memcpy       the model's bytes copied once inside the trainer: the limit of shared memory
    broadcast    the same bytes by gloo between the two processes, in the best of several piece sizes: the limit of gloo
    load         vLLM's own `load_weights` of the same tensors, already in the engine's memory: the limit of both
    readable     our transport alone, until every byte can be read in the engine
    sync         the whole of it: sent, loaded, checksums of both ends compared
    a tensor at a time  a call and a broadcast for each tensor, as other systems do

All run in turn, round after round, since the machine is noisy; medians are told.

    python benchmarks/weight_sync.py [--rounds 7] [--only small-64]
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch
from ray import cloudpickle
from rlhf_api.roles import ModelSource, RandomModel
from rlhf_api.runtime_config import SyncPath
from rlhf_runtime.models import materialize
from rlhf_runtime.single_controller.worker import SPIN_COUNT
from rlhf_runtime.weight_sync.client import raise_failure
from rlhf_runtime.weight_sync.verify import verify
from torch.distributed import TCPStore

cloudpickle.register_pickle_by_value(sys.modules[__name__])

HOST = "127.0.0.1"
THREADS = len(os.sched_getaffinity(0))
PATHS = ("shm", "gloo")
PIECES = (16 << 20, 64 << 20)
BUCKET_BYTES = 256 << 20
"""The manifest's default."""
MODELS = {
    "large-64": {"hidden_size": 1024, "intermediate_size": 1344, "num_hidden_layers": 2},
    "small-64": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 25},
    "large-512": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 2},
    "small-512": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 196},
}
"""Few large tensors or many small ones, and MB of float32."""
TARGETS = {
    "shm readable / memcpy": 0.5,
    "gloo readable / broadcast": 0.8,
    "shm sync / load": 1.4,
    "gloo sync / max(broadcast, load)": 1.3,
    "a tensor at a time / gloo sync": 3.0,
}


class Engine:
    """The engine's process; transports are exchanged in it, which only a benchmark does."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(THREADS)
        from rlhf_runtime.engines.vllm_engine import EngineSettings, VLLMEngine

        self.engine = VLLMEngine(folder, EngineSettings("cpu", "shm", 64, 1, 0.3))
        self.worker = self.engine.llm.llm_engine.model_executor.driver_worker.worker
        self.ways: dict[tuple[str, bool], Any] = {}

    def choose(self, transport: str, load: bool) -> None:
        """Receive over a transport from now on; without loading, bytes that arrive are left where they are."""
        from rlhf_runtime.weight_sync.transports import ENGINE_BACKENDS
        from vllm.config import WeightTransferConfig
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        if (transport, load) not in self.ways:
            config = WeightTransferConfig(backend=ENGINE_BACKENDS[transport])
            model = self.worker.model_runner.get_model()
            way = WeightTransferEngineFactory.create_engine(config, self.worker.vllm_config, self.worker.device, model)
            if not load:
                way.start_weight_update = way.finish_weight_update = lambda: None
                way.load = lambda bucket: None
            self.ways[transport, load] = way
        self.worker.weight_transfer_engine = self.ways[transport, load]

    def transfer_weights(self, step: str, info: Any) -> None:
        raise_failure(self.engine.llm.collective_rpc("attempt_transfer", args=(step, info)))

    def received(self) -> Any:
        return self.engine.received_weights()

    def join(self, port: int) -> None:
        self.group = gloo(TCPStore(HOST, port, is_master=False), 1)

    def receive(self, size: int, piece: int) -> None:
        if not hasattr(self, "bytes"):
            self.bytes = torch.zeros(size, dtype=torch.uint8)
        for part in self.bytes.split(piece):
            self.group.broadcast(part, 0).wait()

    def update(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Receive and load one tensor."""
        tensor = torch.empty(shape, dtype=dtype)
        self.group.broadcast(tensor, 0).wait()
        self.worker.model_runner.get_model().load_weights([(name, tensor)])

    def load(self, specs: list[tuple[str, torch.dtype, tuple[int, ...]]]) -> float:
        """Seconds to load tensors that are there."""
        if not hasattr(self, "weights"):
            self.weights = [(name, torch.randn(shape, dtype=dtype)) for name, dtype, shape in specs]
        self.choose("shm", load=True)
        begin = time.perf_counter()
        self.transfer_weights("start_weight_update", None)
        self.worker.model_runner.get_model().load_weights(self.weights)
        self.transfer_weights("finish_weight_update", None)
        return time.perf_counter() - begin


class Trainer:
    """The policy's process."""

    def __init__(self, folder: Path, engine: Any) -> None:
        torch.set_num_threads(THREADS)
        from rlhf_runtime.weight_sync.sender import WeightSender
        from transformers import AutoModelForCausalLM

        self.module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.engine = engine
        self.senders = {
            (transport, load): WeightSender(
                self.module,
                "",
                SyncPath(transport=transport, reason="-", **self.path(load)),
                [engine],
                0,
                workers_per_engine=1,
                host=HOST,
            )
            for transport in PATHS
            for load in (False, True)
        }

    @staticmethod
    def path(load: bool) -> dict[str, Any]:
        return {"bucket_bytes": BUCKET_BYTES, "verify": load, "timeout_seconds": 60}

    def specs(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.module.named_parameters()]

    def copy(self) -> float:
        """Seconds of a copy of the model's bytes, as one tensor."""
        if not hasattr(self, "bytes"):
            size = sum(tensor.numel() * 4 for tensor in self.module.parameters())
            self.bytes, self.copied = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
        begin = time.perf_counter()
        self.copied.copy_(self.bytes)
        return time.perf_counter() - begin

    def send(self, transport: str, load: bool) -> tuple[float, Any]:
        """Seconds of a send, and what was sent; without loading, of the move of all buckets alone."""
        sender = self.senders[transport, load]
        transfer = sender._joined()
        move, moved = transfer.send_all, []

        def timed() -> None:
            begin = time.perf_counter()
            move()
            moved.append(time.perf_counter() - begin)

        transfer.send_all = timed
        begin = time.perf_counter()
        report = sender.send(afresh=False)
        seconds = time.perf_counter() - begin
        transfer.send_all = move
        return seconds if load else moved[0], report

    def join(self) -> None:
        store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        joining = self.engine.join.remote(store.port)
        self.group = gloo(store, 0)
        ray.get(joining)

    def broadcast(self, piece: int) -> float:
        """Seconds of a broadcast of the model's bytes, in pieces."""
        receiving = self.engine.receive.remote(len(self.bytes), piece)
        begin = time.perf_counter()
        for part in self.bytes.split(piece):
            self.group.broadcast(part, 0).wait()
        ray.get(receiving)
        return time.perf_counter() - begin

    def send_by_tensor(self) -> float:
        """Seconds of a whole sync with a call and a broadcast a tensor."""
        begin = time.perf_counter()
        ray.get(self.engine.transfer_weights.remote("start_weight_update", None))
        for name, tensor in self.module.named_parameters():
            updating = self.engine.update.remote(name, tensor.dtype, tuple(tensor.shape))
            self.group.broadcast(tensor.detach(), 0).wait()
            ray.get(updating)
        ray.get(self.engine.transfer_weights.remote("finish_weight_update", None))
        return time.perf_counter() - begin


def gloo(store: TCPStore, rank: int) -> Any:
    """A plain gloo group of the two processes."""
    from torch.distributed import PrefixStore, ProcessGroupGloo

    return ProcessGroupGloo(PrefixStore("raw", store), rank, 2, timedelta(seconds=60))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds after one warm-up")
    parser.add_argument("--only", choices=MODELS, nargs="*", default=list(MODELS), help="models to measure")
    options = parser.parse_args()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    results = {name: measure(MODELS[name], options.rounds) for name in options.only}
    ray.shutdown()
    print(json.dumps({"benchmark": "weight_sync", "rounds": options.rounds, "cpus": os.cpu_count(), **results}))


def measure(config: dict[str, int], rounds: int) -> dict[str, float]:
    """All ways for one model; prints its table."""
    heads = {"num_attention_heads": config["hidden_size"] // 64, "num_key_value_heads": config["hidden_size"] // 64}
    model = RandomModel(architecture="qwen2", config={**config, **heads, "tie_word_embeddings": False})
    with tempfile.TemporaryDirectory() as folder:
        path = materialize(ModelSource(random=model), Path(folder))
        environment = {"runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(THREADS), "GOMP_SPINCOUNT": SPIN_COUNT}}}
        engine = ray.remote(num_cpus=1, **environment)(Engine).remote(path)
        trainer = ray.remote(num_cpus=1, **environment)(Trainer).remote(path, engine)
        ways, size, tensors = prepare(engine, trainer)
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            samples[name].append(way())
    for actor in (trainer, engine):
        ray.kill(actor)
    seconds = {name: statistics.median(values[1:]) for name, values in samples.items()}
    return told(seconds, size, tensors)


def prepare(engine: Any, trainer: Any) -> tuple[dict[str, Callable[[], float]], int, int]:
    """What is measured, by name, and the model's bytes and number of tensors."""
    specs = ray.get(trainer.specs.remote())
    ray.get([trainer.copy.remote(), engine.choose.remote("shm", True)])
    ray.get(trainer.join.remote())

    def sync(transport: str) -> float:
        ray.get(engine.choose.remote(transport, True))
        begin = time.perf_counter()
        _, report = ray.get(trainer.send.remote(transport, True))
        verify(report.checksums, ray.get(engine.received.remote())[0], "the engine")
        return time.perf_counter() - begin

    def readable(transport: str) -> float:
        ray.get(engine.choose.remote(transport, False))
        return ray.get(trainer.send.remote(transport, False))[0]

    ways: dict[str, Callable[[], float]] = {"memcpy": lambda: ray.get(trainer.copy.remote())}
    for piece in PIECES:
        ways[f"broadcast, {piece >> 20} MiB pieces"] = lambda piece=piece: ray.get(trainer.broadcast.remote(piece))
    ways["load"] = lambda: ray.get(engine.load.remote(specs))
    for transport in PATHS:
        ways[f"{transport} readable"] = lambda transport=transport: readable(transport)
        ways[f"{transport} sync"] = lambda transport=transport: sync(transport)
    ways["a tensor at a time"] = lambda: ray.get(trainer.send_by_tensor.remote())
    return ways, sum(torch.Size(shape).numel() * 4 for _, _, shape in specs), len(specs)


def told(seconds: dict[str, float], size: int, tensors: int) -> dict[str, float]:
    """Print the table of one model, and return what is in it."""
    best = min(seconds[name] for name in seconds if name.startswith("broadcast"))
    ratios = {
        "shm readable / memcpy": seconds["memcpy"] / seconds["shm readable"],
        "gloo readable / broadcast": best / seconds["gloo readable"],
        "shm sync / load": seconds["shm sync"] / seconds["load"],
        "gloo sync / max(broadcast, load)": seconds["gloo sync"] / max(best, seconds["load"]),
        "a tensor at a time / gloo sync": seconds["a tensor at a time"] / seconds["gloo sync"],
    }
    print(f"\n{size / 1e6:.0f} MB in {tensors} tensors")
    for name, value in seconds.items():
        print(f"  {name:34} {value:7.3f} s  {size / value / 1e9:6.2f} GB/s")
    for name, value in ratios.items():
        bound = "at most" if " sync / " in name else "at least"
        print(f"  {name:34} {value:7.2f}    target: {bound} {TARGETS[name]}", flush=True)
    return {name: round(value, 4) for name, value in {**seconds, **ratios, "bytes": size, "tensors": tensors}.items()}


if __name__ == "__main__":
    main()
