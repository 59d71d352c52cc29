"""From a run's settings to its trainer: model, data, rewards and TRL's arguments."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from transformers import PreTrainedTokenizerBase, PrinterCallback

from grpo_lab.models import load_model, lora_config
from grpo_lab.monitoring import MemoryMeter
from grpo_lab.tasks import correctness_reward, format_reward, lenient_correctness_reward, load_task, overlong_reward
from grpo_lab.training.config import OBJECTIVE_SETTINGS, RunConfig
from grpo_lab.training.errors import RunConfigError
from grpo_lab.training.guards import ObjectiveWarning
from grpo_lab.training.trainer import ChunkedGRPOConfig, ChunkedGRPOTrainer

RewardFunction = Callable[..., list[float]]


def reward_functions(config: RunConfig) -> list[RewardFunction]:
    """The functions that `config.rewards` names, in its order."""
    known: dict[str, RewardFunction] = {
        "correctness": correctness_reward,
        "lenient_correctness": lenient_correctness_reward,
        "format": format_reward,
        "overlong": partial(
            overlong_reward,
            max_completion_length=config.max_completion_length,
            overlong_tokens=config.overlong_buffer,
        ),
    }
    return [known[name] for name in config.rewards]


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
        RunConfigError: `device` names none, or CUDA was asked for and there is none.
    """
    if config.device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    else:
        try:
            device = torch.device(config.device)
        except RuntimeError:
            raise RunConfigError(f"device must be cpu, cuda or cuda:NUMBER; got {config.device!r}.") from None
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
    with warnings.catch_warnings():
        # The run's own settings said it already.
        warnings.simplefilter("ignore", ObjectiveWarning)
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
            **{name: getattr(config, name) for name in OBJECTIVE_SETTINGS},
        )


def build_trainer(
    config: RunConfig, meter: MemoryMeter, rewards: list[RewardFunction] | None = None
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
    config: RunConfig, meter: MemoryMeter, rewards: list[RewardFunction] | None
) -> tuple[ChunkedGRPOTrainer, PreTrainedTokenizerBase]:
    arguments = trainer_arguments(config)
    if rewards is not None:
        arguments.reward_weights = [1.0] * len(rewards)
    dataset = load_task(config.task, split="train", size=config.task_size, seed=config.seed)
    model, tokenizer = load_model(config.model, dtype=_dtype(config), device=torch_device(config))
    trainer = ChunkedGRPOTrainer(
        model=model,
        args=arguments,
        reward_funcs=rewards or reward_functions(config),
        train_dataset=dataset,
        processing_class=tokenizer,
        peft_config=lora_config(r=config.lora_r, alpha=config.lora_alpha, target_modules=config.target_modules()),
        meter=meter,
    )
    return trainer, tokenizer
