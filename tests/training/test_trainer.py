"""The trainer on the chunked head against TRL's own, and against plain logits."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from trl import GRPOTrainer

from grpo_lab.training import ChunkedGRPOConfig, ChunkedGRPOTrainer, ChunkedRLOOConfig, ChunkedRLOOTrainer
from grpo_lab.training.chunked_trainer import check_trainable

Rollouts = dict[str, torch.Tensor]


def loss_and_gradients(trainer: Any, inputs: Rollouts) -> tuple[float, dict[str, torch.Tensor], dict[str, float]]:
    """Loss, gradients by parameter name and logged metrics of one micro-batch."""
    trainer.model.train()
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return loss.item(), gradients, metrics


def assert_same(ours: Any, theirs: Any, tolerance: float = 1e-5) -> None:
    loss, gradients, metrics = ours
    expected_loss, expected_gradients, expected_metrics = theirs
    assert loss == pytest.approx(expected_loss, abs=tolerance)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], atol=tolerance, rtol=1e-4, msg=name)
    assert metrics.keys() == expected_metrics.keys()
    for name, value in metrics.items():
        assert value == pytest.approx(expected_metrics[name], abs=1e-4, nan_ok=True), name


@pytest.fixture
def off_policy(rollouts: Rollouts) -> Rollouts:
    """The rollouts with old and reference log-probs that differ from the policy's."""
    generator = torch.Generator().manual_seed(3)
    near = -4.0 + torch.randn(rollouts["completion_ids"].shape, generator=generator)
    far = -4.0 + torch.randn(rollouts["completion_ids"].shape, generator=generator)
    return rollouts | {"old_per_token_logps": near, "ref_per_token_logps": far}


@pytest.mark.parametrize("chunk_size", [1, 3, 16, 4096])
@pytest.mark.parametrize("tied", [False, True])
def test_a_trainable_head_equals_trl_at_any_chunk_size(
    make_trainer: Callable[..., Any],
    model_factory: Callable[..., Any],
    off_policy: Rollouts,
    chunk_size: int,
    tied: bool,
) -> None:
    theirs = make_trainer(GRPOTrainer, model=model_factory(tie_word_embeddings=tied))
    ours = make_trainer(model=model_factory(tie_word_embeddings=tied), implementation="torch", chunk_size=chunk_size)
    assert_same(loss_and_gradients(ours, off_policy), loss_and_gradients(theirs, off_policy))


def test_a_head_in_modules_to_save_is_trained(
    make_trainer: Callable[..., Any], lora: Callable[..., LoraConfig], rollouts: Rollouts
) -> None:
    trainer = make_trainer(lora=lora(target_modules=["q_proj"], modules_to_save=["lm_head"]), implementation="torch")
    _, gradients, _ = loss_and_gradients(trainer, rollouts)
    trained = [name for name in gradients if "lm_head" in name]
    assert trained == ["base_model.model.lm_head.modules_to_save.default.weight"]
    assert gradients[trained[0]].abs().max() > 0


def from_own_logits(trainer: Any, model: Any, ids: torch.Tensor, mask: torch.Tensor, keep: int, **_: Any) -> Any:
    """Log-probs and entropies of the completion from all logits of the model itself."""
    logits = model(input_ids=ids, attention_mask=mask).logits[:, -keep - 1 : -1] / trainer.temperature
    all_logps = logits.log_softmax(-1)
    logps = all_logps.gather(-1, ids[:, -keep:, None])[..., 0]
    return logps, -(all_logps.exp() * all_logps).sum(-1), None


HEAD_ADAPTERS: dict[str, dict[str, Any]] = {
    "list": {"target_modules": ["q_proj", "lm_head"]},
    "pattern": {"target_modules": r".*(q_proj|lm_head)"},
    "head alone, rsLoRA": {"target_modules": ["lm_head"], "use_rslora": True},
    "DoRA": {"target_modules": ["q_proj", "lm_head"], "use_dora": True},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": {"lm_head": [3, 7]}},
}


@pytest.mark.parametrize("settings", HEAD_ADAPTERS.values(), ids=HEAD_ADAPTERS)
@pytest.mark.parametrize("implementation", ["torch", "reference", "triton"])
def test_an_adapter_on_the_head_has_the_loss_and_gradients_of_the_unfused_path(
    make_trainer: Callable[..., Any],
    lora: Callable[..., LoraConfig],
    open_adapter: Callable[[Any], None],
    off_policy: Rollouts,
    settings: dict[str, Any],
    implementation: str,
) -> None:  # case L01
    trainer = make_trainer(lora=lora(**settings), implementation=implementation, chunk_size=5, beta=0.1)
    open_adapter(trainer.model)
    ours = loss_and_gradients(trainer, off_policy)
    assert sum("lm_head" in name for name in ours[1]) >= (1 if "trainable_token_indices" in settings else 2)
    trainer._get_per_token_logps_and_entropies = partial(from_own_logits, trainer)
    assert_same(ours, loss_and_gradients(trainer, off_policy))


def test_an_adapter_on_the_head_learns_and_is_off_in_the_reference(
    make_trainer: Callable[..., Any], lora: Callable[..., LoraConfig]
) -> None:  # case L01
    trainer = make_trainer(
        lora=lora(target_modules=["lm_head"]), implementation="torch", max_steps=2, beta=0.1, learning_rate=0.01
    )
    trainer.train()
    moved = {n: float(p.detach().abs().max()) for n, p in trainer.model.named_parameters() if "lora_B" in n}
    assert list(moved) == ["base_model.model.lm_head.lora_B.default.weight"]
    assert all(size > 0 for size in moved.values())
    kls = [row["kl"] for row in trainer.state.log_history if "loss" in row]
    assert kls[0] == pytest.approx(0, abs=1e-6)
    assert kls[1] > 1e-6


def test_an_adapter_on_the_head_that_is_not_known_is_refused_by_name(
    make_trainer: Callable[..., Any], lora: Callable[..., LoraConfig], model_factory: Callable[..., Any]
) -> None:
    with pytest.raises(ValueError, match=r"DoRA adapter 'default' drops inputs.*\(module 'lm_head'\)"):
        make_trainer(lora=lora(target_modules=["lm_head"], use_dora=True, lora_dropout=0.1))
    model = model_factory()
    with pytest.raises(ValueError, match=r"ia3.layer.Linear puts an adapter on the LM head"):
        make_trainer(model=get_peft_model(model, IA3Config(target_modules=["lm_head"], feedforward_modules=[])))
    assert "get_output_embeddings" not in vars(model)


@pytest.mark.parametrize("implementation", ["torch", "reference"])
def test_left_padded_rows_score_like_each_row_alone(
    make_trainer: Callable[..., Any], rollouts: Rollouts, implementation: str
) -> None:  # case T07; one prompt and one completion are of one token
    trainer = make_trainer(implementation=implementation, temperature=0.7)
    ids = torch.cat([rollouts["prompt_ids"], rollouts["completion_ids"]], dim=1)
    mask = torch.cat([rollouts["prompt_mask"], rollouts["completion_mask"]], dim=1)
    together, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 7)
    for row in range(ids.size(0)):
        tokens = ids[row][mask[row].bool()]
        length = int(rollouts["completion_mask"][row].sum())
        logits = trainer.model(input_ids=tokens[None]).logits[0].double() / 0.7
        positions = range(len(tokens) - length - 1, len(tokens) - 1)
        expected = [logits[p].log_softmax(-1)[tokens[p + 1]].item() for p in positions]
        assert together[row, :length].tolist() == pytest.approx(expected, abs=1e-5)
        assert not together[row, length:].any()


@pytest.mark.parametrize("loss_type", ["dapo", "dr_grpo", "grpo"])
def test_four_micro_batches_give_the_gradient_of_one_batch(
    make_trainer: Callable[..., Any], off_policy: Rollouts, loss_type: str
) -> None:
    whole = make_trainer(loss_type=loss_type, implementation="torch", chunk_size=5)
    _, expected, _ = loss_and_gradients(whole, off_policy)
    split = make_trainer(
        loss_type=loss_type,
        implementation="torch",
        chunk_size=5,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
    )
    split.model.train()
    for start in range(0, 8, 2):
        part = {k: v if v.dim() == 0 else v[start : start + 2] for k, v in off_policy.items()}
        split.compute_loss(split.model, part).backward()
    for name, parameter in split.model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_batch_with_every_token_masked_gives_zero_gradients(
    make_trainer: Callable[..., Any],
    lora: Callable[..., LoraConfig],
    off_policy: Rollouts,
    loss_type: str,
    beta: float,
) -> None:
    trainer = make_trainer(lora=lora(), loss_type=loss_type, beta=beta, implementation="torch")
    masked = off_policy | {
        "completion_mask": torch.zeros_like(off_policy["completion_mask"]),
        "num_items_in_batch": torch.tensor(0),
    }
    loss, gradients, _ = loss_and_gradients(trainer, masked)
    assert loss == 0.0
    assert gradients
    assert all(not gradient.any() for gradient in gradients.values())


def test_on_policy_the_ratio_is_one_and_the_kl_zero(
    make_trainer: Callable[..., Any], lora: Callable[..., LoraConfig]
) -> None:  # case X10
    trainer = make_trainer(
        lora=lora(lora_dropout=0.5), temperature=0.7, beta=0.04, num_iterations=2, disable_dropout=True,
        implementation="torch", chunk_size=3,
    )  # fmt: skip
    trainer.model.train()
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    assert "old_per_token_logps" in batch
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    trainer.chunk_size = 1000
    logps, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, batch["completion_ids"].size(1))
    assert (logps - batch["old_per_token_logps"]).abs().max() < 1e-5
    assert (logps - batch["ref_per_token_logps"]).abs().max() < 1e-5


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_second_iteration_sees_a_policy_that_moved(
    make_trainer: Callable[..., Any], lora: Callable[..., LoraConfig], accumulation: int
) -> None:  # case X12
    trainer = make_trainer(
        lora=lora(), num_iterations=2, max_steps=2, epsilon=1e-4, implementation="torch",
        gradient_accumulation_steps=accumulation, per_device_train_batch_size=8 // accumulation,
    )  # fmt: skip
    trainer.train()
    clipped = [row["clip_ratio/region_mean"] for row in trainer.state.log_history if "loss" in row]
    assert clipped[0] == 0.0
    assert clipped[1] > 0.0


def test_the_reference_of_a_trained_adapter_is_that_adapter(
    make_trainer: Callable[..., Any],
    model_factory: Callable[..., Any],
    lora: Callable[..., LoraConfig],
    open_adapter: Callable[[Any], None],
) -> None:
    policy = get_peft_model(model_factory(), lora())
    open_adapter(policy)
    trainer = make_trainer(model=policy, beta=0.04, max_steps=3, implementation="torch")
    reference = {name: p.clone() for name, p in policy.named_parameters() if ".ref." in name}
    trainer.train()
    assert trainer.state.log_history[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert trainer.state.log_history[2]["kl"] > 0
    assert reference
    for name, parameter in policy.named_parameters():
        if name in reference:
            assert parameter.grad is None
            assert torch.equal(parameter, reference[name]), name


def test_the_reference_of_a_new_adapter_is_the_model_below_it(
    make_trainer: Callable[..., Any], lora: Callable[..., LoraConfig], open_adapter: Callable[[Any], None]
) -> None:  # case T03
    trainer = make_trainer(lora=lora(), beta=0.04, max_steps=1, implementation="torch")
    open_adapter(trainer.model)
    trainer.train()
    assert trainer.state.log_history[0]["kl"] > 1e-3


@pytest.mark.parametrize("checkpointing", [True, False])
def test_training_takes_the_same_steps_as_trl(
    make_trainer: Callable[..., Any], lora: Callable[..., LoraConfig], checkpointing: bool
) -> None:
    rows = []
    for cls in (GRPOTrainer, ChunkedGRPOTrainer):
        trainer = make_trainer(
            cls, lora=lora(), max_steps=3, gradient_checkpointing=checkpointing, beta=0.01, num_iterations=2
        )
        trainer.train()
        rows.append([row for row in trainer.state.log_history if "loss" in row])
    for ours, theirs in zip(rows[1], rows[0], strict=True):
        assert ours.keys() == theirs.keys()
        for name in sorted({"loss", "reward", "grad_norm", "kl", "entropy"} & theirs.keys()):
            assert ours[name] == pytest.approx(theirs[name], abs=2e-5), name


def test_generation_goes_through_the_plain_forward(
    make_trainer: Callable[..., Any], model_factory: Callable[..., Any], rollouts: Rollouts
) -> None:
    trainer = make_trainer()
    ids = rollouts["prompt_ids"][1:2]
    assert torch.equal(trainer.model(input_ids=ids).logits, model_factory()(input_ids=ids).logits)
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 5}
    assert torch.equal(trainer.model.generate(ids, **settings), model_factory().generate(ids, **settings))
    with pytest.raises(ValueError, match="not used by the model"):
        trainer.model.generate(ids, nonsense=1)


def test_a_model_with_nothing_to_train_is_refused_before_the_first_step(
    make_trainer: Callable[..., Any], model_factory: Callable[..., Any], lora: Callable[..., LoraConfig]
) -> None:
    adapter_for_inference = get_peft_model(model_factory(), lora())
    adapter_for_inference.requires_grad_(False)
    with pytest.raises(ValueError, match=r"no trainable parameter \(0 of \d+"):
        make_trainer(model=adapter_for_inference)


def test_an_optimizer_of_another_model_is_refused(model_factory: Callable[..., Any]) -> None:
    model, other = model_factory(), model_factory()
    check_trainable(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(ValueError, match="none of them among the model's"):
        check_trainable(model, torch.optim.SGD(other.parameters(), lr=1.0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunk_size": 0}, r"chunk_size must be .* int >= 1; got 0"),
        ({"chunk_size": 2.5}, r"chunk_size must be .* got 2.5"),
        ({"temperature": 0.0}, r"temperature must be > 0"),
        ({"implementation": "fast"}, r"implementation must be one of auto, triton, torch, reference; got 'fast'"),
        ({"per_device_train_batch_size": 6, "num_generations": 4}, r"must divide the 6 .* Valid here: 2, 3, 6"),
    ],
)
def test_bad_settings_are_refused(tmp_path: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChunkedGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **changes)


def test_groups_may_span_micro_batches(tmp_path: Any) -> None:
    config = ChunkedGRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, per_device_train_batch_size=4, num_generations=2,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    assert config.generation_batch_size == 8


def test_groups_are_never_split_by_a_last_short_batch(make_trainer: Callable[..., Any]) -> None:  # case X14
    trainer = make_trainer(implementation="torch", max_steps=4)
    trainer.train_dataset = trainer.train_dataset.select(range(3))
    trainer.train()
    assert trainer.state.global_step == 4
    prompts = list(trainer._logs["prompt"])
    assert len(set(prompts[:4])) == len(set(prompts[4:])) == 1


def test_halving_the_batch_by_itself_is_refused(tmp_path: Any) -> None:  # case X14
    with pytest.raises(ValueError, match="auto_find_batch_size"):
        ChunkedGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, auto_find_batch_size=True)


ADVANTAGES = {"group": [0, 0, 0, 0, -0.865875, 0.865875, -0.865875, 0.865875],
              "batch": [0, 0, 0, 0, -1.079890, 1.079890, -1.079890, 1.079890],
              "none": [0, 0, 0, 0, -0.5, 0.5, -0.5, 0.5]}  # fmt: skip


@pytest.mark.parametrize("scope", ADVANTAGES)
def test_advantages_of_each_scope(make_trainer: Callable[..., Any], scope: str) -> None:  # case T08
    trainer = make_trainer(
        implementation="torch",
        scale_rewards=scope,
        max_steps=1,
        reward=lambda **_: [1, 1, 1, 1, 0, 1, 0, 1],
    )
    trainer.train()
    found = [row["advantage"] for row in trainer.scored_completions()]
    assert found == pytest.approx(ADVANTAGES[scope], abs=1e-5)
    if scope == "group":
        assert trainer.state.log_history[0]["frac_reward_zero_std"] == 0.5


def test_rounding_of_equal_rewards_teaches_nothing(make_trainer: Callable[..., Any]) -> None:  # case T08
    trainer = make_trainer(
        implementation="torch", max_steps=1, per_device_train_batch_size=7, num_generations=7,
        reward=lambda completions, **_: [0.7] * len(completions),
    )  # fmt: skip
    trainer.train()
    assert max(abs(row["advantage"]) for row in trainer.scored_completions()) < 1e-3


def test_dropout_that_moves_ratios_is_warned_of(
    make_trainer: Callable[..., Any], lora: Callable[..., LoraConfig]
) -> None:  # case X10
    def warned(cls: type = ChunkedGRPOTrainer, rate: float = 0.5, **config: Any) -> bool:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make_trainer(cls, lora=lora(lora_dropout=rate), **config)
        return any("dropout of 0.5 is on" in str(warning.message) for warning in caught)

    assert warned(beta=0.1)
    assert warned(num_iterations=2)
    assert warned(ChunkedRLOOTrainer)
    assert not warned()
    assert not warned(beta=0.1, disable_dropout=True)
    assert not warned(beta=0.1, rate=0.0)


def test_lengths_are_of_what_was_sampled_not_of_what_was_kept(make_trainer: Callable[..., Any]) -> None:  # case X15
    rows, kept = [], []
    for masked in (False, True):
        trainer = make_trainer(
            implementation="torch", max_steps=1, mask_truncated_completions=masked,
            generation_kwargs={"sequence_bias": [[[2], 5.0]]},
        )  # fmt: skip
        trainer.train()
        rows.append({k: v for k, v in trainer.state.log_history[0].items() if k.startswith("completions/")})
        kept.append(int(trainer._buffered_inputs[0]["completion_mask"].sum()))
    assert rows[0] == rows[1]
    assert 0.0 < rows[0]["completions/clipped_ratio"] < 1.0
    assert rows[0]["completions/max_length"] == 7
    assert 0 < kept[1] < kept[0]


def test_completions_are_written_down_without_a_tracker(
    make_trainer: Callable[..., Any], tmp_path: Path
) -> None:  # case X18
    trainer = make_trainer(implementation="torch", max_steps=1, log_completions=True)
    trainer.train()
    assert list((tmp_path / "completions").glob("*.parquet"))
    assert len(trainer.scored_completions()) == 8


def test_arguments_of_another_trainer_are_refused(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="args must be a ChunkedRLOOConfig; got ChunkedGRPOConfig"):
        ChunkedRLOOTrainer(model=None, args=ChunkedGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False))
    with pytest.raises(ValueError, match=r"chunk_size must be .* got 0"):
        ChunkedRLOOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, chunk_size=0)
    trainer = make_trainer(ChunkedRLOOTrainer, beta=0.0, implementation="torch", chunk_size=9)
    assert (trainer.chunk_size, trainer.implementation) == (9, "torch")
