"""Stratified draws among siblings: particles whose whole text is the same.

Siblings draw their next token from one distribution. With independent uniforms some of its mass
is drawn twice by chance, and some is missed. Siblings that share one uniform instead, shifted by
``rank / count`` around the circle, cover the distribution evenly, while each still draws from
exactly that distribution. So no weight changes, and E[Z-hat] stays what it is.
(Systematic resampling does the same to ancestors; Chopin and Papaspiliopoulos 2020, section 9.7.)
"""

import torch

from sglang_smc.smc.randomness import mix


def equal_texts(texts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Which particles have one text: ``[G, N, J]`` texts, ``[G, N]`` lengths to ``[G, N, N]``.

    Texts are told apart by 64 bits. Were two ever taken for one, their draws would depend on each
    other, and each would still have its law.
    """
    column = torch.arange(texts.shape[2], device=texts.device)
    terms = mix(texts ^ mix(column))
    keys = torch.where(column < lengths.unsqueeze(2), terms, 0).sum(2)  # [G, N]
    return keys.unsqueeze(2) == keys.unsqueeze(1)


def same_text(
    texts: torch.Tensor, lengths: torch.Tensor, may_stratify: torch.Tensor
) -> torch.Tensor:
    """The siblings among a group's particles, an equivalence ``[G, N, N]`` bool.

    Args:
        texts: ``[G, N, J]`` the token before each tail, and the tail; the rest is common to all.
        lengths: ``[G, N]`` of the tails.
        may_stratify: ``[G, N]`` bool; the others are siblings of nobody but themselves.
    """
    same = equal_texts(texts, lengths + 1)
    itself = torch.eye(texts.shape[1], dtype=torch.bool, device=texts.device)
    return itself | (same & may_stratify.unsqueeze(2) & may_stratify.unsqueeze(1))


def still_same(same_text: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Siblings ``[G, N, N]`` that remain so after one more token each, ``[G, N]``."""
    return same_text & (tokens.unsqueeze(2) == tokens.unsqueeze(1))


def stratified(uniforms: torch.Tensor, same_text: torch.Tensor) -> torch.Tensor:
    """Spread the uniforms of siblings evenly: ``[G, N]`` float64 to ``[G, N]``.

    Args:
        same_text: ``[G, N, N]`` bool, an equivalence; alone, a particle keeps its own uniform.
    """
    eldest = same_text.long().argmax(2)  # [G, N]: the sibling of the lowest index
    rank = same_text.tril(-1).sum(2)
    shifted = uniforms.gather(1, eldest) + rank / same_text.sum(2).double()
    return shifted - shifted.floor()


def stratify(
    uniforms: torch.Tensor, same_text: torch.Tensor, tokens: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep as siblings those with equal tokens, then spread the uniforms of siblings evenly.

    Args:
        uniforms: ``[G, N]`` float64.
        same_text: ``[G, N, N]`` bool, an equivalence.
        tokens: ``[G, N]`` int64, one more token each; None leaves the siblings as they are.

    Returns:
        Uniforms ``[G, N]`` and the siblings that remain ``[G, N, N]``.
    """
    if tokens is not None:
        same_text = still_same(same_text, tokens)
    return stratified(uniforms, same_text), same_text
