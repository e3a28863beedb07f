from dataclasses import replace

import pytest
import torch


@pytest.mark.parametrize(
    ("shape", "dtype", "of_a_block", "fits"),
    [
        ((8, 8, 32, 128), "bfloat16", 227, True),
        ((16, 4, 128, 128), "bfloat16", 163, True),
        ((4, 4, 65, 32), "bfloat16", 99, False),
        ((8, 8, 32, 128), "float32", 99, False),
        ((8, 8, 128, 128), "float32", 227, False),
        ((8, 8, 32, 129), "bfloat16", 227, False),
        ((8, 8, 32, 128), "float16", 227, False),
    ],
)
def test_what_is_covered(
    shape: tuple[int, int, int, int], dtype: str, of_a_block: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from logitmix.modules.losses import mol_triton

    monkeypatch.setattr(mol_triton, "_shared_memory", lambda device: of_a_block * 1024)
    monkeypatch.setattr(mol_triton, "_is_hopper", lambda device: True)
    assert mol_triton.covers(*shape, getattr(torch, dtype), torch.device("cuda")) == fits


@pytest.mark.gpu
def test_cuda_tensors_are_served_by_triton_and_reproducibly() -> None:
    from mol_triton_checks import on
    from test_mol_loss import fused, make

    case = on("cuda", make([100, 0, 40], 30, shape=(8, 8, 32, 128), rate=0.2))
    torch.use_deterministic_algorithms(True)
    try:
        results = []
        for _ in range(3):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = fused(case)
            results.append([loss.detach(), *case.gradients(loss)])
    finally:
        torch.use_deterministic_algorithms(False)
    for result in results[1:]:
        assert all(torch.equal(got, first) for got, first in zip(result, results[0], strict=True))


@pytest.mark.gpu
def test_memory_of_the_papers_size() -> None:
    """25,600 positions x 128 negatives, 8 x 8 x 32: one [T, N, M] array of BF16 has 400 MiB."""
    from mol_triton_checks import on
    from test_mol_loss import fused, make

    case = on("cuda", make([128] * 200, 128, 40_000, (8, 8, 32, 128), 0.2).to(torch.bfloat16))
    case = replace(case, negatives_GN=case.negatives_GN.contiguous())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    case.gradients(fused(case))
    assert torch.cuda.max_memory_allocated() - before < 400 * 2**20
