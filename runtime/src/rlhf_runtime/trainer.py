"""The training loop.

    prompts ─ generate ─ log-probabilities ─ values and rewards ─ advantages ─ update ─ sync ─ next step
              rollout    policy │ reference   critic │ reward      driver       critic    policy to rollout
                                                                                policy

What stands side by side is submitted together and runs at the same time where it runs on different workers.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rlhf_api import RuntimeConfig

from rlhf_runtime.data import PromptLoader, make_batch
from rlhf_runtime.experience import add_advantages, step_metrics
from rlhf_runtime.preflight import Inputs
from rlhf_runtime.protocol import DataProto
from rlhf_runtime.report import Report, Sample
from rlhf_runtime.single_controller import ResourcePoolManager
from rlhf_runtime.weight_sync import SyncReport, sync_weights
from rlhf_runtime.worker_groups import RoleGroups, spawn_worker_groups

PLACEMENT_SECONDS = 300
"""How long placement groups may take to be ready."""

logger = logging.getLogger(__name__)

SCORED = ("prompt_ids", "response_ids")
"""Columns that a model scores."""


def train(config: RuntimeConfig, inputs: Inputs, report: Report) -> None:
    """Train a config to its end on the Ray that this process is connected to, and report on it.

    Raises:
        RLHFError: when a worker, reward, number or placement failed. What was reported until then is kept.
    """
    with ExitStack() as ending:
        ending.callback(report.close)
        report.start()
        trainer = Trainer(config, inputs, report)
        trainer.init_workers()
        trainer.fit()
        trainer.export()


class Trainer:
    """The single controller of a run: one driver that commands the worker groups of all roles."""

    def __init__(self, config: RuntimeConfig, inputs: Inputs, report: Report) -> None:
        self.config = config
        self.prompts = PromptLoader(inputs.prompts, config.data.batch_size, config.seed)
        self.tokenizer = inputs.tokenizer
        self.report = report
        self.pools = ResourcePoolManager(config.groups, PLACEMENT_SECONDS)
        self.roles: RoleGroups = {}
        self.version = 0

    def init_workers(self) -> None:
        """Reserve the pools, start every role, and give the engines the policy's first weights."""
        began = time.perf_counter()
        self.pools.create()
        for group in self.config.groups:
            logger.info("Starting group %s: %d × %s", group.name, group.workers, ", ".join(group.roles))
        self.roles = spawn_worker_groups(self.config, self.pools)
        for group in self.roles.values():
            group.wait_ready()
        self.roles["policy"].connect_engines(self.roles["rollout"].workers)
        self.sync(version=0)
        logger.info("Ready after %.0f s, first step begins", time.perf_counter() - began)

    def fit(self) -> None:
        """Run the job's steps; each ends with the new weights in the engines."""
        for step in range(1, self.config.training.steps + 1):
            clock = PhaseClock()
            batch = make_batch(next(self.prompts), self.config.rollout.samples_per_prompt)
            with clock.phase("rollout"):
                batch = self.generate(batch)
            with clock.phase("logprob"):
                batch = self.add_log_probs(batch)
            batch = self.add_values_and_rewards(batch, clock)
            batch = add_advantages(batch, self.config.algorithm)
            with clock.phase("update"):
                trained = self.update(batch)
            with clock.phase("sync"):
                synced = self.sync(version=step)
            metrics = step_metrics(step, batch, self.config, trained, synced, clock.seconds())
            self.report.step(metrics, samples_of(batch, self.config.observability.samples_per_step))

    def generate(self, batch: DataProto) -> DataProto:
        """Add a response to every prompt, as tokens and as text."""
        rollout = self.roles["rollout"].generate(batch.select(["prompt_ids", "sample_index"]), self.version).get()
        texts = self.tokenizer.batch_decode(
            [row.tolist() for row in rollout.batch["response_ids"].unbind()], skip_special_tokens=True
        )
        return batch.union(rollout).union(DataProto.from_dict({}, {"response": texts}))

    def add_log_probs(self, batch: DataProto) -> DataProto:
        """Add the policy's own log-probabilities and the reference's."""
        tokens = batch.select(SCORED)
        old = self.roles["policy"].compute_log_probs(tokens)
        reference = self.roles["reference"].compute_log_probs(tokens)
        return batch.union(old.get()).union(reference.get())

    def add_values_and_rewards(self, batch: DataProto, clock: "PhaseClock") -> DataProto:
        """Add the critic's values and the rewards."""
        values = self.roles["critic"].compute_values(batch.select(SCORED))
        scores = self.roles["reward"].score(batch.select(["prompt", "response", "columns"]))
        with clock.phase("value"):
            batch = batch.union(values.get())
        with clock.phase("reward"):
            return batch.union(scores.get())

    def update(self, batch: DataProto) -> dict[str, float]:
        """Train critic and policy, and return the metrics of both."""
        critic = self.roles["critic"].update(batch.select([*SCORED, "values", "returns"]))
        policy = self.roles["policy"].update(batch.select([*SCORED, "old_log_probs", "ref_log_probs", "advantages"]))
        return critic.get()[0] | policy.get()[0]

    def sync(self, version: int) -> SyncReport:
        """Give the policy's weights to every engine under a new version."""
        report = sync_weights(self.roles["policy"], self.roles["rollout"], version)
        self.version = version
        return report

    def export(self) -> None:
        """Write the trained policy as a Hugging Face folder into the run folder."""
        folder = Path(self.config.run_dir) / "model"
        self.roles["policy"].export(str(folder))
        logger.info("The trained model is in %s", folder)


class PhaseClock:
    """Wall time of a step's phases. They add up: of work side by side, each counts what it is waited for longer."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what happens inside."""
        start = time.perf_counter()
        yield
        self._seconds[name] = time.perf_counter() - start

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase, and since the clock was made as `step`."""
        return {**self._seconds, "step": time.perf_counter() - self._start}


def samples_of(batch: DataProto, count: int) -> list[Sample]:
    """The first `count` responses of a batch, to be read."""
    texts = batch.non_tensor_batch
    return [
        Sample(
            prompt=str(texts["prompt"][row]),
            response=str(texts["response"][row]),
            score=batch.batch["scores"][row].item(),
            weight_version=int(batch.batch["weight_version"][row]),
        )
        for row in range(min(count, len(batch)))
    ]
