"""Rows of a table dealt out to places, and what lies at several places summed up again: each is the other's backward."""

from torch import Tensor

from pentatron.kernels.choice import by_kernel


def deal_rows(x_TD: Tensor, places_TK: Tensor) -> Tensor:
    """Row t goes to all of its places; together they are all rows of the result, each once."""
    if by_kernel(x_TD):
        from pentatron.kernels import rows_triton

        return rows_triton.deal_rows(x_TD.contiguous(), places_TK)
    out = x_TD.new_empty(places_TK.numel(), x_TD.shape[1])
    return out.index_copy_(0, places_TK.flatten(), x_TD.repeat_interleave(places_TK.shape[1], 0))


def sum_rows(rows_ND: Tensor, places_TK: Tensor) -> Tensor:
    """Row t of the result is the sum of the rows at the places of t, added in fp32 in their order."""
    if by_kernel(rows_ND):
        from pentatron.kernels import rows_triton

        return rows_triton.sum_rows(rows_ND.contiguous(), places_TK)
    found = rows_ND.index_select(0, places_TK.flatten()).unflatten(0, places_TK.shape)
    return found.float().sum(1).to(rows_ND.dtype)
