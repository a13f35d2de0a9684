"""Rows packed into one line, layers computed anew, bfloat16: none of it changes what is learned."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf_api.roles import ModelSource, RandomModel
from rlhf_api.training import Optimizer
from rlhf_runtime.engines.sequences import Sequences
from rlhf_runtime.engines.torch_engine import TorchEngine
from rlhf_runtime.errors import InputError
from rlhf_runtime.models import materialize
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.usefixtures("one_rank")

Sizes = list[tuple[int, int]]
SIZES: Sizes = [(3, 5), (9, 1), (1, 8), (6, 3), (2, 6)]
"""Prompt and response tokens of each row."""
row_sizes = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=8)


def sequences(sizes: Sizes = SIZES) -> Sequences:
    generator = torch.Generator().manual_seed(0)
    draw = lambda count: torch.randint(2, 97, (count,), generator=generator)  # noqa: E731
    return Sequences([draw(p) for p, _ in sizes], [draw(r) for _, r in sizes])


def engine(folder: Path, **options) -> TorchEngine:
    options = {"head": "lm", "micro_batch_tokens": 1000, "optimizer": Optimizer(learning_rate=1e-3), **options}
    return TorchEngine(folder, device=torch.device("cpu"), **options)


def gradient(trained: TorchEngine, rows: Sequences) -> dict[str, torch.Tensor]:
    """Of the mean log-probability and entropy, by parameter; forgotten by the engine."""
    trained.accumulate(rows, lambda outputs, at: (outputs[0] + outputs[1]).sum() / rows.tokens)
    found = {name: parameter.grad.full_tensor() for name, parameter in trained.module.named_parameters()}
    trained.stepper.optimizer.zero_grad()
    return found


@pytest.fixture(scope="module")
def trained(make_peaked: Callable[..., Path]) -> TorchEngine:
    return engine(make_peaked(tie_word_embeddings=True), entropy_gradient=True)


@settings(max_examples=50, deadline=None)
@given(row_sizes, st.integers(1, 60))
def test_micro_batches_hold_every_row_once_within_the_budget(sizes: Sizes, tokens: int) -> None:
    rows = sequences(sizes)
    cut = rows.micro_batches(tokens)
    assert sorted(row for part in cut for row in part) == list(range(len(rows)))
    sums = [sum(sum(sizes[row]) for row in part) for part in cut]
    assert all(total <= tokens or len(part) == 1 for total, part in zip(sums, cut, strict=True))
    assert all(first + second > tokens for first, second in itertools.pairwise(sums)), "one had room"
    assert cut == sequences(sizes).micro_batches(tokens)


@settings(max_examples=50, deadline=None)
@given(row_sizes)
def test_no_token_is_padding(sizes: Sizes) -> None:
    [rows] = sequences(sizes).micro_batches(1000)
    packed = sequences(sizes).model_input(rows)
    assert packed.input_ids.shape == packed.position_ids.shape == (1, sum(p + r - 1 for p, r in sizes))
    assert len(packed.places) == len(packed.targets) == sum(r for _, r in sizes)


@settings(max_examples=25, deadline=None)
@given(row_sizes, st.integers(1, 60), st.randoms(use_true_random=False))
def test_scores_and_gradients_are_those_of_rows_alone(trained: TorchEngine, sizes: Sizes, tokens: int, random) -> None:
    rows, order = sequences(sizes), random.sample(range(len(sizes)), len(sizes))
    mixed = Sequences([rows.prompts[i] for i in order], [rows.responses[i] for i in order])
    trained.micro_batch_tokens = 1
    alone = [trained.score(Sequences([p], [r])) for p, r in zip(mixed.prompts, mixed.responses, strict=True)]
    expected = gradient(trained, rows)
    trained.micro_batch_tokens = tokens
    for index, column in enumerate(trained.score(mixed)):
        torch.testing.assert_close(column, torch.cat([row[index] for row in alone]), atol=1e-5, rtol=1e-5)
    scale = max(value.abs().max() for value in expected.values()).item()
    torch.testing.assert_close(gradient(trained, mixed), expected, atol=1e-5 * scale, rtol=1e-4)


def test_attention_that_slides_sees_what_transformers_lets_it(make_peaked: Callable[..., Path]) -> None:
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    folder, rows = make_peaked(**window), sequences()
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    assert plain.config.layer_types == ["full_attention", "sliding_attention"]
    expected = []
    for prompt, response in zip(rows.prompts, rows.responses, strict=True):
        with torch.no_grad():
            log_softmax = plain(input_ids=torch.cat([prompt, response])[None]).logits[0].log_softmax(-1)
        expected.append(log_softmax[len(prompt) - 1 : -1].gather(-1, response[:, None]).squeeze(-1))
    torch.testing.assert_close(engine(folder).score(rows)[0], torch.cat(expected), atol=1e-4, rtol=1e-5)


def test_a_model_that_mixes_rows_is_refused(tmp_path: Path) -> None:
    config = {"hidden_size": 32, "num_hidden_layers": 1, "state_size": 4, "initializer_range": 0.3}
    mamba = materialize(ModelSource(random=RandomModel(architecture="mamba", config=config)), tmp_path)
    for head in ("lm", "value"):
        with pytest.raises(InputError, match=r"mamba.*Fix:"):
            engine(mamba, head=head)


@pytest.mark.parametrize(("architecture", "unlike"), [("gemma2", "softcap"), ("gpt_oss", "s_aux")])
def test_attention_that_is_not_plain_is_refused_by_name(tmp_path: Path, architecture: str, unlike: str) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {**sizes, "num_key_value_heads": 1, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1}
    made = materialize(ModelSource(random=RandomModel(architecture=architecture, config=config)), tmp_path)
    for head in ("lm", "value"):
        with pytest.raises(InputError, match=rf"got a {architecture} model with {unlike} in its attention; .*Fix:"):
            engine(made, head=head)


def test_layers_computed_anew_give_the_same_gradients(trained: TorchEngine) -> None:
    kept: list[int] = []

    def gradient_and_memory(recompute: bool) -> dict[str, torch.Tensor]:
        model = engine(trained.folder, entropy_gradient=True, recompute=recompute)
        saved = 0

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal saved
            saved += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            found = gradient(model, sequences())
        kept.append(saved)
        return found

    without, with_it = gradient_and_memory(False), gradient_and_memory(True)
    assert without.keys() == with_it.keys()
    assert all(torch.equal(with_it[name], without[name]) for name in without)
    assert kept[1] < 0.7 * kept[0]


@pytest.mark.parametrize("recompute", [False, True])
def test_bfloat16_is_near_float32_and_learns(tmp_path: Path, recompute: bool) -> None:
    config = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    source = RandomModel(architecture="qwen2", config={**config, "num_key_value_heads": 1, "initializer_range": 0.3})
    folder, rows = materialize(ModelSource(random=source), tmp_path), sequences()
    full, half = engine(folder), engine(folder, dtype="bfloat16", recompute=recompute)
    before = half.score(rows)[0]
    error = (before - full.score(rows)[0]).abs()
    assert before.dtype == torch.float32
    assert 0 < error.mean() < 0.05
    assert error.max() < 0.5
    expected = torch.cat([value.flatten() for value in gradient(full, rows).values()])
    found = torch.cat([value.flatten() for value in gradient(half, rows).values()])
    assert torch.cosine_similarity(found, expected, dim=0) > 0.98
    for _ in range(10):
        step = half.train_step(rows, lambda outputs, at: -outputs[0].sum() / rows.tokens)
    assert step.loss < -before.mean() - 0.1
    assert half.score(rows)[0].mean() > before.mean() + 0.1
    kinds = {parameter.dtype for parameter in half.module.parameters()}
    kinds |= {state.dtype for states in half.stepper.optimizer.state.values() for state in states.values()}
    assert kinds == {torch.float32}, "what is sent to engines and saved has lost precision"


def test_values_in_bfloat16_are_float32_to_the_loss(trained: TorchEngine) -> None:
    critic = engine(trained.folder, head="value", dtype="bfloat16")
    torch.nn.init.constant_(critic.module.value_head.weight, 0.1)
    full = engine(trained.folder, head="value")
    torch.nn.init.constant_(full.module.value_head.weight, 0.1)
    seen = []
    critic.accumulate(sequences(), lambda outputs, at: seen.append(outputs[0].dtype) or outputs[0].sum())
    assert seen == [torch.float32]
    assert torch.corrcoef(torch.stack([*critic.score(sequences()), *full.score(sequences())]))[0, 1] > 0.99
