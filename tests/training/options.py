"""Every option of TRL's trainers: what it does to the loss, and values that show it; or why it does nothing to it."""

from dataclasses import dataclass, field
from typing import Any

Settings = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One value of one option.

    Attributes:
        option: field of TRL's config.
        value: what it is set to.
        needs: other fields without which it would do nothing, or not be allowed.
        run: compared over a whole short training run, since it acts in sampling, scoring or between steps; else over
            `steps` micro-batches of fixed rollouts.
        steps: micro-batches.
        world: what surrounds the loss: `"lora"` (rank 4 on each layer), `"dropout"` (the same, dropout 0.5), `"half"`
            (the model in bf16), `"experts"` (a mixture of experts), `"whole"` (all weights, from a folder), or
            `"sampler"` (completions and log-probs from elsewhere, as vLLM gives them).
        acts: the value changes loss, gradient or metrics, else they are to stay as they are.
        tolerance: largest relative difference to TRL; 1e-5 in fp32.
    """

    option: str
    value: Any
    needs: Settings = field(default_factory=dict)
    run: bool = False
    steps: int = 1
    world: str = "lora"
    acts: bool = True
    tolerance: float = 1e-5

    @property
    def settings(self) -> Settings:
        return self.needs | {self.option: self.value}

    @property
    def name(self) -> str:
        return "-".join(f"{name}={value}" for name, value in ({self.option: self.value} | self.needs).items())


ADAPTIVE: Settings = {
    "use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 10.0, "entropy_coef_delta": 0.05,
}  # fmt: skip
SEQUENCE: Settings = {"importance_sampling_level": "sequence"}
SYNC: Settings = {"beta": 0.1, "sync_ref_model": True, "max_steps": 3}
CLOSE: Settings = {"vllm_importance_sampling_clip_max": 1.05}
# bf16 rounds to 8 bits; the reference that both round away from is compared elsewhere.
BF16 = 5e-2
# With an fp32 head only the layers below it round, the same for both but for the last bit (1 of 256).
BF16_STEP = 8e-3

LOSS_TYPES = [
    Case("loss_type", "grpo"),
    Case("loss_type", "bnpo"),
    Case("loss_type", "dr_grpo"),
    Case("loss_type", "dapo", acts=False),  # the default
    Case("loss_type", "cispo", {"epsilon_high": 5.0}),
    Case("loss_type", "cispo", {"epsilon_high": 1.1}),
    Case("loss_type", "sapo"),
    Case("loss_type", "luspo", SEQUENCE),
    Case("loss_type", "luspo", {"beta": 0.1}),
    Case("loss_type", "vespo"),
]

OBJECTIVE = [
    Case("importance_sampling_level", "sequence", {"loss_type": "grpo"}),
    Case("importance_sampling_level", "sequence", {"loss_type": "dapo", "beta": 0.1}),
    Case("epsilon", 0.05),
    Case("epsilon_high", 0.05),
    Case("delta", 1.25),
    Case("delta", 1.1, {"loss_type": "grpo"} | SEQUENCE),
    Case("beta", 0.1),
    Case("beta", 0.1, {"loss_type": "vespo"}),
    Case("use_bias_correction_kl", False, {"beta": 0.1}),
    Case("use_bias_correction_kl", False, {"beta": 0.1, "loss_type": "grpo"} | SEQUENCE),
    Case("sapo_temperature_neg", 3.0, {"loss_type": "sapo"}),
    Case("sapo_temperature_pos", 0.5, {"loss_type": "sapo"}),
    Case("vespo_k_pos", 1.0, {"loss_type": "vespo"}),
    Case("vespo_lambda_pos", 1.0, {"loss_type": "vespo"}),
    Case("vespo_k_neg", 1.0, {"loss_type": "vespo"}),
    Case("vespo_lambda_neg", 1.0, {"loss_type": "vespo"}),
    Case("top_entropy_quantile", 0.5),
    Case("top_entropy_quantile", 0.2, {"beta": 0.1, "loss_type": "grpo"}),
    Case("entropy_coef", 0.05),
    Case("entropy_coef", -0.05, {"loss_type": "grpo", "gradient_accumulation_steps": 2}),
    Case("entropy_coef", 0.05, {"top_entropy_quantile": 0.5, "loss_type": "vespo"}),
    Case("use_adaptive_entropy", True, {"entropy_coef": 0.1, "entropy_target": 10.0}, steps=3),
    Case("use_adaptive_entropy", True, {"entropy_target": 10.0, "entropy_coef_delta": 0.05}, steps=3),
    Case("entropy_target", 10.0, {"use_adaptive_entropy": True, "entropy_coef": 0.1}, steps=3),
    Case("entropy_coef_delta", 0.05, {"use_adaptive_entropy": True, "entropy_coef": 0.1}, steps=2),
    Case("entropy_coef_max", 0.12, ADAPTIVE, steps=3),
    Case("entropy_coef_min", 0.08, ADAPTIVE | {"entropy_target": 0.2}, steps=3),
    Case("off_policy_mask_threshold", 0.05),
    Case("off_policy_mask_threshold", 0.05, {"loss_type": "grpo", "beta": 0.1} | SEQUENCE),
    Case("temperature", 0.7),
    Case("temperature", 1.3, {"loss_type": "vespo", "beta": 0.1}),
    Case("max_completion_length", 16, {"loss_type": "dr_grpo"}),
    Case("gradient_accumulation_steps", 4, {"loss_type": "grpo"}),
    Case("steps_per_generation", 4),
    Case("steps_per_generation", 4, {"gradient_accumulation_steps": 2}),
    Case("disable_dropout", True, world="dropout"),
    Case("cast_lm_head_to_fp32", True, world="half", tolerance=BF16_STEP),
    Case("cast_lm_head_to_fp32", True, {"bf16": True}, tolerance=BF16_STEP),
    Case("bf16", True, tolerance=BF16),
    Case("router_aux_loss_coef", 0.1, world="experts"),
    Case("router_aux_loss_coef", 0.0, world="experts"),
]

# What acts in sampling, scoring, between steps, or only inside the training loop.
RUNS = [
    Case("scale_rewards", "batch", run=True),
    Case("scale_rewards", "none", run=True),
    Case("multi_objective_aggregation", "normalize_then_sum", run=True),
    Case("reward_weights", [1.0, 0.3], run=True),
    Case("mask_truncated_completions", True, run=True),
    Case("num_iterations", 2, {"beta": 0.1}, run=True),
    Case("num_iterations", 2, {"gradient_accumulation_steps": 2, "max_steps": 4}, run=True),
    Case("num_generations", 2, run=True),
    Case("generation_batch_size", 16, run=True),
    Case("steps_per_generation", 2, run=True),
    Case("gradient_accumulation_steps", 2, run=True),
    Case("per_device_train_batch_size", 4, run=True),
    Case("use_adaptive_entropy", True, {"entropy_coef": 0.1, "entropy_target": 10.0, "max_steps": 3}, run=True),
    Case("pad_to_multiple_of", 8, run=True, acts=False),
    Case("gradient_checkpointing", False, run=True, acts=False),
    Case("gradient_checkpointing_kwargs", {"use_reentrant": True}, run=True, acts=False),
    Case("neftune_noise_alpha", 5.0, run=True),
    Case("sync_ref_model", True, {"beta": 0.1, "ref_model_sync_steps": 1, "max_steps": 3}, run=True, world="whole"),
    Case("ref_model_mixup_alpha", 0.1, SYNC | {"ref_model_sync_steps": 1}, run=True, world="whole"),
    Case("ref_model_sync_steps", 1, SYNC, run=True, world="whole"),
    Case("vllm_importance_sampling_correction", False, run=True, world="sampler"),
    Case("vllm_importance_sampling_mode", "sequence_truncate", CLOSE, run=True, world="sampler"),
    Case("vllm_importance_sampling_mode", "token_truncate", CLOSE, run=True, world="sampler"),
    Case("vllm_importance_sampling_mode", "token_mask", CLOSE | {"loss_type": "vespo"}, run=True, world="sampler"),
    Case("vllm_importance_sampling_clip_max", 1.05, run=True, world="sampler"),
    Case("vllm_importance_sampling_clip_min", 0.97, run=True, world="sampler"),
    Case("vllm_importance_sampling_cap", 1.05, run=True, world="sampler"),
    Case("off_policy_mask_threshold", 0.05, run=True, world="sampler"),
]

GRPO_CASES = LOSS_TYPES + OBJECTIVE + RUNS

# Triton's interpreter takes seconds a pass, so a few cases that reach each kind of gradient.
TRITON_CASES = [
    Case("loss_type", "vespo"),
    Case("importance_sampling_level", "sequence", {"loss_type": "grpo", "beta": 0.1, "temperature": 0.7}),
    Case("entropy_coef", 0.05, {"top_entropy_quantile": 0.5}),
]

RLOO_CASES = [
    Case("epsilon", 0.05),
    Case("epsilon_high", 0.05),
    Case("temperature", 0.9),
    # A ratio of whole sequences is the exponential of a sum of rounded log-probs.
    Case("bf16", True, tolerance=2 * BF16),
    Case("disable_dropout", True, world="dropout"),
    Case("router_aux_loss_coef", 0.1, world="experts"),
    Case("beta", 0.0, run=True),
    Case("normalize_advantages", True, run=True),
    Case("reward_clip_range", (0.2, 3.0), run=True),
    Case("reward_weights", [1.0, 0.3], run=True),
    Case("mask_truncated_completions", True, run=True),
    Case("num_iterations", 2, run=True),
    Case("num_generations", 2, run=True),
    Case("gradient_accumulation_steps", 2, run=True),
    Case("sync_ref_model", True, {"ref_model_sync_steps": 1, "max_steps": 3}, run=True, world="whole"),
]
# What RLOO shares with GRPO, in TRL and here, and what the cases of GRPO compare.
RLOO_AS_GRPO = """
    generation_batch_size steps_per_generation per_device_train_batch_size max_completion_length pad_to_multiple_of
    gradient_checkpointing gradient_checkpointing_kwargs neftune_noise_alpha ref_model_mixup_alpha ref_model_sync_steps
"""

# Reason why nothing of it reaches the pass from hidden states to the loss: fields.
NOT_LOSS = {
    "sampling, which goes through the plain forward": """
        top_p top_k min_p repetition_penalty generation_kwargs chat_template_kwargs cache_implementation use_cache
        max_tool_calling_iterations use_transformers_continuous_batching transformers_continuous_batching_config
        use_transformers_paged ds3_gather_for_generation
    """,
    "sampling by vLLM; what comes back from it is compared by the cases of the sampler": """
        use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url
        vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization
        vllm_max_model_length vllm_tensor_parallel_size
    """,
    "evaluation, compared in a test of its own": """
        num_generations_eval per_device_eval_batch_size eval_strategy eval_steps eval_delay eval_on_start
        prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps do_eval
        bf16_full_eval include_for_metrics batch_eval_metrics
    """,
    "the optimizer, after the gradient": """
        learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps optim optim_args optim_target_modules
        weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm num_train_epochs max_steps
    """,
    "data: which rows come in which order": """
        shuffle_dataset remove_unused_columns seed data_seed full_determinism accelerator_config dataloader_drop_last
        dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
        dataloader_multiprocessing_context dataloader_in_order train_sampling_strategy length_column_name
        ignore_data_skip
    """,
    "the loss of labels, which TRL's own loss takes the place of": """
        label_smoothing_factor label_names average_tokens_across_devices
    """,
    "loading of the model": "model_init_kwargs trust_remote_code",
    "logging": """
        log_completions log_multimodal num_completions_to_print log_unique_prompts log_completions_hub_repo
        logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter log_level
        log_level_replica include_num_input_tokens_seen disable_tqdm report_to run_name project trackio_space_id
        trackio_bucket_id trackio_static_space_id skip_memory_metrics debug
    """,
    "saving": """
        output_dir save_only_model save_strategy save_steps save_on_each_node save_total_limit enable_jit_checkpoint
        push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
        load_best_model_at_end metric_for_best_model greater_is_better restore_callback_states_from_checkpoint
        resume_from_checkpoint
    """,
    "other names of gradient_checkpointing and gradient_checkpointing_kwargs": """
        activation_checkpointing activation_checkpointing_kwargs
    """,
    "which commands a script runs": "do_train do_predict",
    "the machine: needs a GPU, several processes, a compiler or a package that the tests do not ask for": """
        use_cpu fp16 fp16_full_eval tf32 torch_compile torch_compile_backend torch_compile_mode torch_empty_cache_steps
        use_liger_kernel liger_kernel_config parallelism_config ddp_find_unused_parameters ddp_bucket_cap_mb
        ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout fsdp fsdp_config deepspeed local_rank
    """,
    "refused by TRL, since it would split groups": "auto_find_batch_size",
}
