"""L2 attention by name in the models of Hugging Face."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lipformer.functional.attention.untied import untied_operands

NAME = "lipformer_l2"
"""What it is called there."""


def register_l2_attention() -> None:
    r"""Registers "lipformer_l2" in transformers, for ``attn_implementation`` of its models.

    Attention weights become the softmax of :math:`-s\,\|q_i - k_j\|^2` with the scaling s that the model
    gives its dot products (mostly :math:`1/\sqrt d`, as in Kim, Papamakarios, Mnih 2021); projections,
    positions, masks, caches, groups of heads and dropout stay the model's own.

    It carries no certificate: queries, keys and values have weights of their own, and such attention has
    no finite Lipschitz constant (Kim et al. 2021). :func:`lipformer.convert_attention` ties them.

    Needs transformers, which has the name from this call on; calling it again changes nothing.

    Example:
        >>> import transformers
        >>> register_l2_attention()
        >>> sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
        >>> config = transformers.BertConfig(**sizes, attn_implementation="lipformer_l2")
        >>> transformers.BertModel(config).config._attn_implementation
        'lipformer_l2'
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """L2 attention as transformers calls it: (B, H, T, d), twice (B, K, S, .) -> (B, T, H, e), None."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    for name in ("softcap", "s_aux", "cache", "output_attentions"):
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise ValueError(f'attn_implementation="{NAME}" takes no {name}, got {kwargs[name]!r:.60}')
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    operands = untied_operands(query, key, value, scale)
    out, _ = sdpa_attention_forward(module, *operands, attention_mask, scaling=1.0, **kwargs)
    return out[..., : value.shape[-1]], None
