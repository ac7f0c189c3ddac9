"""SGLang's draft trees: links and masks of the chosen candidates, and the walk of a greedy verify."""

from __future__ import annotations

from torch import Tensor


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """As `sgl_build_tree_kernel_efficient_triton`. tree_mask_mode: 0 has the committed tokens in front of each row."""
    n, start = draft_token_num, 0
    for b, length in enumerate(verified_seq_len.tolist()):
        parents = _parents(selected_index[b].tolist(), parent_list[b].tolist(), topk, n)
        retrive_index[b] = range_like(retrive_index[b], b * n)
        for node in range(n - 1, 0, -1):
            if (parent := parents[node]) is not None:
                retrive_next_sibling[b, node] = retrive_next_token[b, parent]
                retrive_next_token[b, parent] = node
        for node in range(n):
            first = start + (length + n) * node + length if tree_mask_mode == 0 else n * n * b + n * node
            path = _path(parents, node, depth)
            row = tree_mask.view(-1)[first : first + n]
            row[:] = False
            row[0] = True
            row[path] = True
            positions.view(-1)[b * n + node] = length + len(path)
        start += n * n + length * n


def range_like(tensor: Tensor, start: int) -> Tensor:
    """start, start + 1, ... in the shape of a row."""
    return tensor.new_ones(tensor.shape).cumsum(0) - 1 + start


def _parents(chosen: list[int], parent_list: list[int], topk: int, n: int) -> list[int | None]:
    """The parent of each node: 0 for the root; None of a candidate whose own parent was not chosen."""
    where = {candidate: at + 1 for at, candidate in reversed(list(enumerate(chosen[: n - 1])))}
    found: list[int | None] = [None]
    for candidate in chosen[: n - 1]:
        level = candidate // topk
        found.append(0 if level == 0 else where.get(parent_list[level]))
    return found


def _path(parents: list[int | None], node: int, depth: int) -> list[int]:
    """A node and its ancestors but the root, at most so many."""
    path: list[int] = []
    at: int | None = node
    while at and len(path) < depth:
        path.append(at)
        at = parents[at]
    return path


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """As `verify_tree_greedy_kernel_triton`: from the root on, the child that is what the target chose."""
    target = target_predict.reshape(-1)
    for b in range(candidates.shape[0]):
        last, node, taken = int(retrive_index[b, 0]), 0, 0
        accept_index[b, 0] = last
        for _ in range(1, accept_index.shape[1]):
            node = int(retrive_next_token[b, node])
            while node != -1 and int(candidates[b, node]) != int(target[last]):
                node = int(retrive_next_sibling[b, node])
            if node == -1:
                break
            predicts[last] = target[last]
            taken += 1
            last = int(retrive_index[b, node])
            accept_index[b, taken] = last
        accept_token_num[b] = taken
        predicts[last] = target[last]
