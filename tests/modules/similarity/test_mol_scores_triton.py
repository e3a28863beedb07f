import pytest
import torch

from logitmix.modules.similarity import mol_scores


@pytest.mark.parametrize(
    ("shape", "dtype", "of_a_block", "fits"),
    [
        ((8, 8, 32, 128), "bfloat16", 227, True),
        ((16, 8, 128, 128), "int8", 163, True),
        ((16, 4, 64, 128), "int8", 99, True),
        ((4, 4, 65, 32), "bfloat16", 99, False),
        ((8, 8, 32, 128), "float32", 99, False),
        ((8, 8, 128, 128), "float32", 227, False),
        ((8, 8, 32, 129), "bfloat16", 227, False),
        ((8, 8, 32, 128), "float64", 227, False),
    ],
)
def test_what_is_covered(
    shape: tuple[int, int, int, int], dtype: str, of_a_block: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from logitmix.modules.losses import mol_triton
    from logitmix.modules.similarity import mol_scores_triton

    monkeypatch.setattr(mol_triton, "_shared_memory", lambda device: of_a_block * 1024)
    part = torch.empty(0, dtype=getattr(torch, dtype))
    assert mol_scores_triton.covers(*shape, (part, part)) == fits
    assert not mol_scores_triton.covers(*shape, (part, part.double()))


@pytest.mark.gpu
@torch.no_grad()
def test_cuda_tensors_are_served_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    from test_mol_scores import candidates, mol_of, sides_of

    mol = mol_of(8, 8, 32, 128)
    sides = sides_of(mol, 2, 1000)
    query, item = (tuple(part.cuda() for part in side) for side in sides)
    item_P, bounds = candidates([700, 1300], 1000)
    mol.cuda()
    found = mol.candidates(query, item, item_P.cuda(), bounds)
    assert torch.equal(mol.candidates(query, item, item_P.cuda(), bounds), found)
    monkeypatch.setattr(mol_scores, "has_triton", lambda: False)
    plain = mol.candidates(query, item, item_P.cuda(), bounds)
    assert not torch.equal(plain, found)
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-4)
