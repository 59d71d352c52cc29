"""What only a GPU shows: sizes beyond 2^16 rows and 2^31 elements, memory, low precision on tensor cores."""

import gc
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from grpo_lab import kernels, objectives
from tests.kernels.cases import IMPLEMENTATIONS, make_case, of_logps_alone, plain, relative_error, scores, specification
from tests.kernels.cases import LEAVES as ALL_LEAVES

pytestmark = [
    pytest.mark.gpu,
    # The NaN-filled buffers come with deterministic mode, which warns of operations that matter to bits only.
    pytest.mark.filterwarnings("ignore:.*determinis"),
]
LEAVES = ("hidden_states", "weight", "bias")
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
MIB = 2**20


@pytest.fixture(autouse=True)
def empty_card() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def normal(*size: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return torch.empty(size, dtype=dtype, device="cuda").normal_().mul_(scale)


def ids(vocabulary: int, *size: int) -> Tensor:
    return torch.randint(vocabulary, size, device="cuda")


@each_implementation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocabulary", [130, 2048, 5003])
@pytest.mark.parametrize("requires_grad", [("hidden_states",), LEAVES], ids="+".join)
@pytest.mark.parametrize("soft_cap", [None, 4.0])
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients(
    implementation: str,
    dtype: torch.dtype,
    vocabulary: int,
    requires_grad: tuple[str, ...],
    soft_cap: float | None,
    bias: bool,
):
    case = make_case(
        (5, 29),
        hidden=72,
        vocabulary=vocabulary,
        bias=bias,
        requires_grad=requires_grad,
        device="cuda",
        dtype=dtype,
        soft_cap=soft_cap,
        logit_scale=0.3,
    )
    expected, by_hand, result = specification(case), plain(case, dtype), scores(case, implementation, 64)
    for name in ("logps", "entropies"):
        allowed = relative_error(getattr(by_hand, name), getattr(expected, name)) + 2e-6
        assert relative_error(getattr(result, name), getattr(expected, name)) < allowed, name
    assert result.grads.keys() == expected.grads.keys()
    for name, grad in result.grads.items():
        allowed = 1.25 * relative_error(by_hand.grads[name], expected.grads[name]) + 2e-6
        assert relative_error(grad, expected.grads[name]) < allowed, name


@each_implementation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("requires_grad", [ALL_LEAVES[:1] + ALL_LEAVES[3:4], ALL_LEAVES], ids="+".join)
def test_an_adapter_on_the_head(implementation: str, dtype: torch.dtype, requires_grad: tuple[str, ...]):
    case = make_case(
        (5, 29), hidden=72, vocabulary=5003, rank=16, scaled=True, requires_grad=requires_grad, device="cuda",
        dtype=dtype, logit_scale=0.3,
    )  # fmt: skip
    expected, by_hand, result = specification(case), plain(case, dtype), scores(case, implementation, 64)
    assert result.grads.keys() == expected.grads.keys()
    assert relative_error(result.logps, expected.logps) < relative_error(by_hand.logps, expected.logps) + 2e-6
    for name, grad in result.grads.items():
        allowed = 1.5 * relative_error(by_hand.grads[name], expected.grads[name]) + 2e-6
        assert relative_error(grad, expected.grads[name]) < allowed, name


@each_implementation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocabulary_tile", [1000, 4096])
@pytest.mark.parametrize("soft_cap", [None, 4.0])
def test_tiles_of_the_vocabulary(implementation: str, dtype: torch.dtype, vocabulary_tile: int, soft_cap: float | None):
    case = make_case(
        (5, 29), hidden=72, vocabulary=5003, rank=16, scaled=True, device="cuda", dtype=dtype, logit_scale=0.3,
        soft_cap=soft_cap, requires_grad=("hidden_states", "low_rank_states"),
    )  # fmt: skip
    case = of_logps_alone(case)
    expected, by_hand = specification(case), plain(case, dtype)
    result = scores(case, implementation, 64, vocabulary_tile=vocabulary_tile)
    for name in ("logps", "entropies"):
        allowed = relative_error(getattr(by_hand, name), getattr(expected, name)) + 2e-6
        assert relative_error(getattr(result, name), getattr(expected, name)) < allowed, name
    for name, grad in result.grads.items():
        allowed = 1.25 * relative_error(by_hand.grads[name], expected.grads[name]) + 2e-6
        assert relative_error(grad, expected.grads[name]) < allowed, name


@each_implementation
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("requires_grad", [("hidden_states",), LEAVES], ids="+".join)
def test_autocast(implementation: str, autocast: torch.dtype, requires_grad: tuple[str, ...]):
    case = make_case((5, 29), hidden=72, vocabulary=5003, requires_grad=requires_grad, device="cuda")
    expected, by_hand = specification(case), plain(case, autocast)
    with torch.autocast("cuda", dtype=autocast):
        result = scores(case, implementation, 64)
    assert relative_error(result.logps, expected.logps) < relative_error(by_hand.logps, expected.logps)
    for name, grad in result.grads.items():
        assert grad.dtype == torch.float32
        assert relative_error(grad, expected.grads[name]) < 1.25 * relative_error(
            by_hand.grads[name], expected.grads[name]
        )


@each_implementation
def test_an_id_outside_the_vocabulary_is_named_before_the_device_faults(implementation: str):
    case = make_case((4, 8), vocabulary=130, device="cuda")
    masked = ~case.completion_mask
    dirty = replace(case, completion_ids=case.completion_ids.masked_fill(masked, 2**31 - 1))
    assert torch.equal(scores(dirty, implementation).logps, scores(case, implementation).logps)
    case.completion_ids[tuple(case.completion_mask.nonzero()[3].tolist())] = 130
    with pytest.raises(ValueError, match="got 130 at position"):
        scores(case, implementation)


@each_implementation
@pytest.mark.parametrize("shape", [(1, 65535), (1, 65536), (1, 131073), (70000, 2)], ids=str)
@pytest.mark.parametrize("requires_grad", [("hidden_states",), LEAVES[:2]], ids="+".join)
def test_more_rows_than_a_grid_axis_holds(implementation: str, shape: tuple[int, int], requires_grad: tuple[str, ...]):
    case = make_case(
        shape,
        hidden=64,
        vocabulary=512,
        bias=False,
        requires_grad=requires_grad,
        device="cuda",
        dtype=torch.bfloat16,
    )
    expected = specification(case)
    # One chunk, so that every row is a program of one launch.
    result = scores(case, implementation, chunk_size=shape[0] * shape[1])
    assert (result.logps - expected.logps).abs().max() < 1e-4
    for name, grad in result.grads.items():
        assert relative_error(grad, expected.grads[name]) < 1e-2, name


@each_implementation
def test_hidden_states_of_more_than_2_31_elements(implementation: str):
    count, hidden, vocabulary, tail = 1_100_000, 2048, 256, 1000
    hidden_states = normal(count, hidden).requires_grad_()
    weight, token_ids = normal(vocabulary, hidden, scale=0.02), ids(vocabulary, count)
    logps, _ = kernels.per_token_logps(
        hidden_states, weight, token_ids, temperature=0.7, chunk_size=2**16, implementation=implementation
    )
    logps.sum().backward()
    last = hidden_states.detach()[-tail:].double().requires_grad_()
    expected, _ = objectives.per_token_logps(last, weight.double(), token_ids[-tail:], temperature=0.7)
    expected.sum().backward()
    assert not logps.isnan().any()
    assert (logps[-tail:] - expected).abs().max() < 1e-4
    assert relative_error(hidden_states.grad[-tail:], last.grad) < 1e-2


@each_implementation
def test_a_head_of_more_than_2_31_elements(implementation: str):
    count, hidden, vocabulary, tail = 64, 16_385, 131_072, 1000
    hidden_states = normal(count, hidden).requires_grad_()
    weight = normal(vocabulary, hidden, scale=0.01).requires_grad_()
    token_ids = vocabulary - 1 - ids(tail, count)
    logps, _ = kernels.per_token_logps(
        hidden_states, weight, token_ids, temperature=0.7, chunk_size=32, implementation=implementation
    )
    logps.sum().backward()
    with torch.no_grad():
        logits = hidden_states.float() @ weight[-tail:].float().T / 0.7
        normalizers = torch.stack(
            [(hidden_states.float() @ rows.float().T / 0.7).logsumexp(-1) for rows in weight.split(8192)]
        ).logsumexp(0)
        expected = logits.gather(1, (token_ids - vocabulary + tail)[:, None])[:, 0] - normalizers
        derivative = -(logits - normalizers[:, None]).exp()
        derivative.scatter_add_(1, (token_ids - vocabulary + tail)[:, None], torch.ones(count, 1, device="cuda"))
        last_rows = derivative.T @ hidden_states.float() / 0.7
    assert (logps - expected).abs().max() < 1e-3
    assert relative_error(weight.grad[-tail:], last_rows) < 1e-2
    assert not hidden_states.grad.isnan().any()


@each_implementation
def test_a_view_whose_row_stride_passes_2_31_elements(implementation: str):
    count, hidden, vocabulary = 70, 64, 256
    storage = torch.zeros(count * 2**25, dtype=torch.bfloat16, device="cuda")
    hidden_states = storage.view(count, 2**25)[:, :hidden].copy_(normal(count, hidden)).detach().requires_grad_()
    weight, token_ids = normal(vocabulary, hidden), ids(vocabulary, count)
    logps, _ = kernels.per_token_logps(
        hidden_states, weight, token_ids, temperature=0.7, chunk_size=16, implementation=implementation
    )
    expected, _ = objectives.per_token_logps(
        hidden_states.detach().double(), weight.double(), token_ids, temperature=0.7
    )
    assert (logps - expected).abs().max() < 1e-4


@each_implementation
def test_a_tile_of_more_than_2_31_elements(implementation: str):
    count, hidden, vocabulary, tail = 14_500, 64, 151_936, 100
    hidden_states = normal(count, hidden).requires_grad_()
    weight, token_ids = normal(vocabulary, hidden, scale=0.2), ids(vocabulary, count)
    logps, _ = kernels.per_token_logps(
        hidden_states, weight, token_ids, temperature=0.7, chunk_size=count, implementation=implementation
    )
    logps.sum().backward()
    last = hidden_states.detach()[-tail:].double().requires_grad_()
    expected, _ = objectives.per_token_logps(last, weight.double(), token_ids[-tail:], temperature=0.7)
    expected.sum().backward()
    assert (logps[-tail:] - expected).abs().max() < 1e-4
    assert relative_error(hidden_states.grad[-tail:], last.grad) < 1e-2


def extra_mib(implementation: str, head_trains: bool, chunk_size: int = 512) -> float:
    """Peak above the inputs of a forward and backward pass at N = 4096, H = 2048, V = 151,936 in bf16."""
    hidden_states = normal(4096, 2048).requires_grad_()
    weight = normal(151_936, 2048, scale=0.02).requires_grad_(head_trains)
    token_ids = ids(151_936, 4096)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logps, _ = kernels.per_token_logps(
        hidden_states,
        weight,
        token_ids,
        temperature=1.0,
        chunk_size=chunk_size,
        implementation=implementation,
    )
    logps.sum().backward()
    assert (weight.grad is not None) == head_trains
    return (torch.cuda.max_memory_allocated() - before) / MIB


def test_a_frozen_head_pays_for_no_gradient_of_its_own():
    tile, kept, head = 512 * 151_936 / MIB, 4096 * 2048 * 2 / MIB, 151_936 * 2048 / MIB
    # A tile in fp32 and one in bf16, the kept rows, small change.
    assert extra_mib("triton", head_trains=False) < 6 * tile + 2 * kept + 30
    # The fp32 accumulator and the bf16 gradient of the head stand beside them.
    assert extra_mib("triton", head_trains=True) > 6 * head


def test_log_ratios_are_zero_on_policy_in_bfloat16():
    vocabulary, hidden = 32_000, 512
    hidden_states, weight = normal(64, 50, hidden), normal(vocabulary, hidden, scale=0.1)
    token_ids = ids(vocabulary, 64, 50)
    options = {"temperature": 0.8, "implementation": "triton"}
    with torch.no_grad():
        old = torch.cat(
            [
                kernels.per_token_logps(h, weight, y, chunk_size=64, **options)[0]
                for h, y in zip(hidden_states.split(16), token_ids.split(16), strict=True)
            ]
        )
    new, _ = kernels.per_token_logps(hidden_states.requires_grad_(), weight, token_ids, chunk_size=1000, **options)
    assert new.dtype == torch.float32
    assert (new - old).abs().max() <= 1e-5
    expected, _ = objectives.per_token_logps(hidden_states.double(), weight.double(), token_ids, temperature=0.8)
    assert (new - expected).abs().max() <= 2e-3


@each_implementation
def test_the_head_gradient_does_not_drift_with_the_number_of_chunks(implementation: str):
    hidden_states, token_ids = normal(8192, 128), ids(32, 8192)
    weight = normal(32, 128, scale=0.1).requires_grad_()
    reference = weight.detach().double().requires_grad_()
    upstream = normal(8192, dtype=torch.float32)
    expected, _ = objectives.per_token_logps(hidden_states.double(), reference, token_ids, temperature=1.0)
    (wanted,) = torch.autograd.grad((expected * upstream).sum(), reference)
    for chunk_size in (8, 100, 8192):
        logps, _ = kernels.per_token_logps(
            hidden_states,
            weight,
            token_ids,
            temperature=1.0,
            chunk_size=chunk_size,
            implementation=implementation,
        )
        (grad,) = torch.autograd.grad((logps * upstream).sum(), weight)
        assert relative_error(grad, wanted) < 1e-2, chunk_size
