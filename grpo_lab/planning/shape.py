"""What the planner reads from a transformers config and from an adapter's settings: sizes, and parameter counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

FAMILIES = ("llama", "qwen2", "qwen3")
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WIDTHS = {"float32": 4, "bfloat16": 2}


def width_of(dtype: str, name: str = "dtype") -> int:
    """Bytes of an element of `"float32"` or `"bfloat16"`; a ValueError names the argument for any other."""
    if dtype not in WIDTHS:
        raise ValueError(f"{name} must be one of {', '.join(WIDTHS)}; got {dtype!r}.")
    return WIDTHS[dtype]


@dataclass(frozen=True)
class LoraSettings:
    """A LoRA adapter as a run makes it: no dropout, the same rank everywhere.

    Attributes:
        r: rank, >= 1.
        target_modules: `"all-linear"` (every linear of the decoder layers), or some of their names.
        dtype: of the adapter's weights; PEFT's default is float32 whatever the model's is.

    Raises:
        ValueError: r < 1, an unknown dtype, or a module that is no linear of a decoder layer.
    """

    r: int = 16
    target_modules: str | tuple[str, ...] = "all-linear"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if isinstance(self.r, bool) or not isinstance(self.r, int) or self.r < 1:
            raise ValueError(f"r (the rank of the adapter) must be an int >= 1; got {self.r!r}.")
        width_of(self.dtype, "the adapter's dtype")
        unknown = [name for name in self.names if name not in LINEARS]
        if unknown or not self.names:
            raise ValueError(
                f"target_modules: the memory plan knows 'all-linear' and {', '.join(LINEARS)}; got "
                f"{', '.join(unknown) or 'none'}."
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The linears with an adapter."""
        if self.target_modules == "all-linear":
            return LINEARS
        return (self.target_modules,) if isinstance(self.target_modules, str) else tuple(self.target_modules)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only model of a known family.

    Attributes:
        family: one of `FAMILIES`.
        vocabulary: V.
        hidden: H.
        intermediate: I, of the MLP.
        layers: L.
        heads: query heads.
        key_value_heads: heads of keys and values.
        head_dim: of one head.
        tied: whether embedding and head are one weight.
        attention_biases: linears of the attention with a bias.
        mlp_bias: whether the MLP's linears have one.
    """

    family: str
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    tied: bool
    attention_biases: tuple[str, ...] = field(default=())
    mlp_bias: bool = False

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        """The sizes in a transformers config.

        Args:
            config: of a causal LM.

        Returns:
            The sizes.

        Raises:
            ValueError: a family, or an activation function, that was not measured.
        """
        family = config.model_type
        if family not in FAMILIES:
            raise ValueError(
                f"config: the memory plan knows the families {', '.join(FAMILIES)}; got {family!r}. What it saves for "
                "the backward pass was not measured."
            )
        if config.hidden_act != "silu":
            raise ValueError(f"config: the memory plan knows hidden_act 'silu'; got {config.hidden_act!r}.")
        biases: tuple[str, ...] = ("q_proj", "k_proj", "v_proj") if family == "qwen2" else ()
        if getattr(config, "attention_bias", False):
            biases = LINEARS[:4]
        return cls(
            family=family,
            vocabulary=config.vocab_size,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            key_value_heads=config.num_key_value_heads or config.num_attention_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            tied=bool(config.tie_word_embeddings),
            attention_biases=biases,
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
        )

    @property
    def query_width(self) -> int:
        """Columns of all query heads."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Columns of all key heads."""
        return self.key_value_heads * self.head_dim

    def linear(self, name: str) -> tuple[int, int]:
        """Columns in and out of a linear of a decoder layer."""
        return {
            "q_proj": (self.hidden, self.query_width),
            "k_proj": (self.hidden, self.key_width),
            "v_proj": (self.hidden, self.key_width),
            "o_proj": (self.query_width, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }[name]

    def has_bias(self, name: str) -> bool:
        """Whether a linear of a decoder layer has a bias."""
        return name in self.attention_biases or (self.mlp_bias and name in LINEARS[4:])

    @property
    def layer_parameters(self) -> int:
        """Of one decoder layer: its linears with their biases, two norms, and Qwen3's norms of queries and keys."""
        linears = sum(i * o + o * self.has_bias(name) for name in LINEARS for i, o in [self.linear(name)])
        return linears + 2 * self.hidden + (2 * self.head_dim if self.family == "qwen3" else 0)

    @property
    def parameters(self) -> int:
        """L layers, the last norm, V x H for the embedding and once more for a head that is not tied to it."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + self.hidden + embeddings

    def adapter_parameters(self, adapter: LoraSettings) -> int:
        """`r (in + out)` for each linear with an adapter, in each layer."""
        return self.layers * sum(adapter.r * sum(self.linear(name)) for name in adapter.names)
