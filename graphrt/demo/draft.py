"""Prompt lookup and greedy acceptance, on the device, with static shapes and no word to the host.

The drafter looks for the longest run of tokens before the end of the text that also occurs earlier, and proposes
what followed there: copying of names, indentation and repeated lines costs no second model.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

LONGEST_MATCH = 8
SHORTEST_MATCH = 2


def propose(
    text: Tensor, length: Tensor, num_tokens: int, longest: int = LONGEST_MATCH, shortest: int = SHORTEST_MATCH
) -> tuple[Tensor, Tensor]:
    """Continue each text as it went on after the longest earlier occurrence of its last tokens.

    Among occurrences that match equally far (up to `longest` tokens) the latest wins. One that ends r tokens before
    the end has r tokens to copy; further ones repeat them, so a loop is continued as a loop.

    Args:
        text: [B, M] uint8, row b's text in columns below `length[b]`; what follows is ignored.
        length: [B] int64, 0 to M.
        num_tokens: how many tokens to propose.
        longest, shortest: bounds of the match in tokens.

    Returns:
        Tokens [B, num_tokens] uint8 and found [B] bool; rows where nothing matched hold meaningless tokens.
    """
    batch, columns = text.shape
    # Column j of `spans` holds the tokens before position j. No byte equals the -1 before the start.
    spans = F.pad(text.to(torch.int16), (longest, 0), value=-1).unfold(1, longest, 1)
    tail = spans.gather(1, length.view(batch, 1, 1).expand(batch, 1, longest))
    matched = (spans == tail).flip(-1).to(torch.int64).cumprod(-1).sum(-1)
    position = torch.arange(columns + 1, device=text.device)
    eligible = (position < length[:, None]) & (matched >= shortest)
    # One maximum over (matched, position) in lexicographic order.
    best = (matched * (columns + 1) + position).masked_fill(~eligible, -1).amax(-1)
    found = best >= 0
    start = best.clamp(min=0) % (columns + 1)
    period = (length - start).clamp(min=1)[:, None]
    source = start[:, None] + torch.arange(num_tokens, device=text.device) % period
    return text.gather(1, source), found


def accept_greedily(window: Tensor, choice: Tensor, known: Tensor, window_len: Tensor) -> Tensor:
    """How many tokens of each window stand: those known beforehand, then drafts until one is not the model's choice.

    Args:
        window: [B, Q] uint8, the tokens that were verified.
        choice: [B, Q] int64; `choice[b, i]` is the model's next token after `window[b, i]`.
        known: [B] int64, tokens at the start of the window that are no drafts.
        window_len: [B] int64, 0 to Q.

    Returns:
        [B] int64, 0 for an empty window.
    """
    offset = torch.arange(window.shape[1], device=window.device)
    predicted = F.pad(choice[:, :-1], (1, 0), value=-1)
    stands = (offset < known[:, None]) | (window == predicted)
    stands = stands & (offset < window_len[:, None])
    return stands.to(torch.int64).cumprod(-1).sum(-1)
