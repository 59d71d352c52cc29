"""From a run's settings to its trainer: model, data, rewards and TRL's arguments."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedTokenizerBase, PrinterCallback

from grpo_lab.models import load_model, lora_config
from grpo_lab.monitoring import MemoryMeter
from grpo_lab.tasks import correctness_reward, format_reward, lenient_correctness_reward, load_task
from grpo_lab.training.config import RunConfig
from grpo_lab.training.errors import RunConfigError
from grpo_lab.training.trainer import ChunkedGRPOConfig, ChunkedGRPOTrainer

REWARD_FUNCTIONS: dict[str, Callable[..., list[float]]] = {
    "correctness": correctness_reward,
    "lenient_correctness": lenient_correctness_reward,
    "format": format_reward,
}


@contextmanager
def without_renaming_warnings() -> Iterator[None]:
    """Hide what transformers 5.24 warns of inside TRL 1.16, a renaming that no user of either can act on."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"(trl|transformers)\.")
        yield


def torch_device(config: RunConfig) -> torch.device:
    """The device that a run trains on.

    Args:
        config: its `device`; none means CUDA where there is one.

    Returns:
        The device.

    Raises:
        RunConfigError: CUDA was asked for and there is none.
    """
    if config.device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    else:
        device = torch.device(config.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RunConfigError(f"device is {config.device!r}, but torch sees no CUDA device here. Use device='cpu'.")
    # The training thread makes this device current, which takes an index.
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device


def _dtype(config: RunConfig) -> str:
    if config.dtype != "auto":
        return config.dtype
    return "bfloat16" if torch_device(config).type == "cuda" else "float32"


def trainer_arguments(config: RunConfig) -> ChunkedGRPOConfig:
    """TRL's arguments for a run; what is not named here keeps TRL's default."""
    device = torch_device(config)
    return ChunkedGRPOConfig(
        output_dir=config.output_dir,
        max_steps=config.steps,
        per_device_train_batch_size=config.completions_per_step // config.gradient_accumulation_steps,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        num_generations=config.num_generations,
        num_iterations=config.num_iterations,
        learning_rate=config.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=config.max_grad_norm,
        max_completion_length=config.max_completion_length,
        temperature=config.temperature,
        loss_type=config.loss_type,
        epsilon=config.epsilon,
        epsilon_high=config.epsilon_high,
        beta=config.beta,
        scale_rewards=config.scale_rewards,
        reward_weights=list(config.rewards.values()),
        disable_dropout=True,
        gradient_checkpointing=config.gradient_checkpointing,
        chunk_size=config.chunk_size,
        implementation=config.implementation,
        seed=config.seed,
        use_cpu=device.type == "cpu",
        bf16=_dtype(config) == "bfloat16",
        dataloader_pin_memory=device.type == "cuda",
        logging_steps=1,
        save_steps=config.save_every,
        save_total_limit=2,
        report_to=[],
        disable_tqdm=True,
    )


def build_trainer(
    config: RunConfig, meter: MemoryMeter, rewards: list[Callable[..., list[float]]] | None = None
) -> tuple[ChunkedGRPOTrainer, PreTrainedTokenizerBase]:
    """Load model and data and make the trainer.

    Args:
        config: the run's settings.
        meter: measures peak memory around the loss and the head.
        rewards: reward functions in TRL's form, in place of those the settings name.

    Returns:
        The trainer, ready to train, and the tokenizer.

    Raises:
        RunConfigError: anything of it cannot be used; the message is the first error's own.
    """
    try:
        with without_renaming_warnings():
            trainer, tokenizer = _build(config, meter, rewards)
    except (ValueError, RuntimeError) as error:
        raise RunConfigError(str(error)) from error
    trainer.remove_callback(PrinterCallback)
    return trainer, tokenizer


def _build(
    config: RunConfig, meter: MemoryMeter, rewards: list[Callable[..., list[float]]] | None
) -> tuple[ChunkedGRPOTrainer, PreTrainedTokenizerBase]:
    arguments = trainer_arguments(config)
    if rewards is not None:
        arguments.reward_weights = [1.0] * len(rewards)
    dataset = load_task(config.task, split="train", size=config.task_size, seed=config.seed)
    model, tokenizer = load_model(config.model, dtype=_dtype(config), device=torch_device(config))
    trainer = ChunkedGRPOTrainer(
        model=model,
        args=arguments,
        reward_funcs=rewards or [REWARD_FUNCTIONS[name] for name in config.rewards],
        train_dataset=dataset,
        processing_class=tokenizer,
        peft_config=lora_config(r=config.lora_r, alpha=config.lora_alpha, target_modules=config.target_modules()),
        meter=meter,
    )
    return trainer, tokenizer
