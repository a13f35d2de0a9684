"""The engine's side: a record of what arrived, kept with any of vLLM's weight-transfer backends.

vLLM's own `compute_weight_checksums` sees almost nothing on CPU, where the weights of linear layers are packed into an
opaque form, so what is checked is what arrived and which parameters it filled.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rlhf_runtime.errors import WeightSyncError
from rlhf_runtime.weight_sync.client import StepFailure, background
from rlhf_runtime.weight_sync.verify import ReceivedWeights, checksum

logger = logging.getLogger(__name__)


class RecordedReceive:
    """Mixin before a vLLM `WeightTransferEngine` that loads by `self.model.load_weights`.

    Starting an update empties the record. A backend that receives in several updates adds to it.
    """

    model: torch.nn.Module
    timeout_seconds: float
    """How long an update may take."""
    _verify: bool
    _tied: frozenset[str] | None = None
    """Seen before the first update: one that broke off leaves the model as if nothing were tied."""

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        """Take what concerns every transport out of the handshake, and give the backend the rest."""
        own = dict(init_dict)
        self.timeout_seconds, self._verify = own.pop("timeout_seconds"), own.pop("verify")
        return super().parse_init_info(own)  # type: ignore[misc]

    def start_weight_update(self) -> None:
        """Start an update and forget the last one."""
        _forget_begun(self.model)
        if self._tied is None:
            self._tied = _second_names(self.model)
        super().start_weight_update()  # type: ignore[misc]
        self._checksums: dict[str, int | None] = {}
        self._loaded: set[str] = set()
        self._partly: set[str] = set()
        # Layerwise reload has just put the model back into the form of its checkpoint: these are what can be loaded.
        self._expected = frozenset(name for name, _ in self.model.named_parameters()) - self._tied

    def receive_weights(self, update_info: Any) -> None:
        """Receive one part of an update through the backend, recording on the way."""
        load = self.model.load_weights

        def load_recorded(weights: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
            with self._recording(list(weights)) as recorded:
                loaded = load(recorded)
            self._loaded |= loaded or set()
            return loaded

        # An instance attribute shadows the method, whatever the backend between here and there does.
        self.model.load_weights = load_recorded
        try:
            super().receive_weights(update_info)  # type: ignore[misc]
        finally:
            del self.model.load_weights

    def finish_weight_update(self) -> None:
        """Finish the update, noting which parameters were filled in part only."""
        self._partly = _partly_loaded(self.model)
        super().finish_weight_update()  # type: ignore[misc]
        # A tied output layer computes with a packed copy of its own on CPU, which layerwise reload leaves as it was.
        for name in self._tied or ():
            layer = self.model.get_submodule(name.rpartition(".")[0])
            if (method := getattr(layer, "quant_method", None)) is not None:
                method.process_weights_after_loading(layer)

    def received_weights(self) -> ReceivedWeights:
        """The record of the last update.

        Raises:
            WeightSyncError: when there was none.
        """
        if not hasattr(self, "_expected"):
            raise WeightSyncError("weightSync: got no update; expected one since the engine started. Fix: sync first")
        return ReceivedWeights(dict(self._checksums), self._expected, frozenset(self._loaded - self._partly))

    @contextmanager
    def _recording(self, weights: list[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Note the weights, and take their checksums: on a CPU beside what happens inside, which reads them too."""

        def record() -> None:
            self._checksums |= {name: checksum(tensor) if self._verify else None for name, tensor in weights}

        if any(tensor.is_cuda for _, tensor in weights):
            record()
            yield weights
            return
        done = background(record)
        yield weights
        done.result()


def _second_names(model: torch.nn.Module) -> frozenset[str]:
    """Names under which a parameter stands in the model once more, such as a tied output layer's."""
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return frozenset(every - {name for name, _ in model.named_parameters()})


def _partly_loaded(model: torch.nn.Module) -> set[str]:
    """Parameters of layers that still wait for a part, such as one of the projections that an engine fuses.

    Embeddings are left out: vLLM pads their vocabulary, so that they wait for rows that no checkpoint has.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    waiting = set()
    for prefix, layer in model.named_modules():
        info = get_layerwise_info(layer)
        begun = info.can_load() and 0 < info.load_numel < info.load_numel_total
        if begun and not isinstance(layer, VocabParallelEmbedding):
            waiting |= {f"{prefix}.{name}" for name, _ in layer.named_parameters(recurse=False)}
    return waiting


def _forget_begun(model: torch.nn.Module) -> None:
    """Drop what an update that broke off left in layers that wait for more, or it would count into the next one."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        if (info := get_layerwise_info(layer)).can_load():
            info.load_numel = 0
            info.loaded_weights.clear()


class TransferExtension:
    """Methods that vLLM mixes into its worker (`worker_extension_cls`), reachable by `collective_rpc`."""

    weight_transfer_engine: RecordedReceive
    _weight_update_active: bool

    def received_weights(self) -> ReceivedWeights:
        """The record of this worker's last update."""
        return self.weight_transfer_engine.received_weights()

    def attempt_transfer(self, step: str, info: dict[str, Any] | None) -> StepFailure | None:
        """One step of vLLM's weight transfer on this worker: a method of it, and its argument if it takes one."""
        try:
            getattr(self, step)(*(() if info is None else (info,)))
        except Exception as error:
            logger.exception("weight sync: %s failed", step)
            # Whoever waits for this worker fails too.
            try:
                self.abandon_weight_update()
            except Exception:
                logger.exception("weight sync: the connection could not be closed")
            return StepFailure.of(step, error)
        return None

    def abandon_weight_update(self) -> None:
        """Leave the update that is going on, if any, and the connection to the trainer."""
        self._weight_update_active = False
        self.weight_transfer_engine.reset_weight_update_target()  # type: ignore[attr-defined]
        self.weight_transfer_engine.shutdown()  # type: ignore[attr-defined]
